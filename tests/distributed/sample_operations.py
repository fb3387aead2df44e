"""Operations of torch on values of shape (N, 3), which give the same on several ranks as in one tensor."""

import torch


def _numbered(n_rows):
    return torch.arange(4.0 * n_rows, dtype=torch.float64).reshape(-1, 4)


def _of_entries(v):
    return torch.linspace(0, 1, v.numel(), dtype=v.dtype)


def _changed_after(v, plain):
    result = v - plain[:, :3]
    plain.zero_()
    return result


OPERATIONS = {
    "arithmetic": lambda v: (2 * v + v[:, :1] / 3 - v.exp()) ** 2,
    "with a row": lambda v: v * torch.arange(3.0, dtype=v.dtype),
    "with plain values": lambda v: v - torch.linspace(0, 1, len(v), dtype=v.dtype)[:, None],
    "with plain values of entries": lambda v: v.view(-1) - _of_entries(v),
    "products with plain values of entries": lambda v: v.view(-1) @ _of_entries(v),
    "with several plain values": lambda v: v[:, 0] * _numbered(len(v)).T,
    "comparison": lambda v: torch.where(v > 0, v, -1.0).clamp(max=0.5),
    "transpose": lambda v: v.T.contiguous().view(3, -1).T + v,
    "columns": lambda v: torch.stack(list(v.unbind(1)), dim=1) + torch.cat([v[:, 1:], v[:, :1]], dim=1),
    "chosen columns": lambda v: v[:, torch.tensor([2, 0])] * v[:, [True, False, True]],
    "one column": lambda v: v[:, 1],
    "precision": lambda v: v.float().double().to(torch.float32),
    "rows of ones": lambda v: v.new_ones((len(v), 2)) + torch.zeros_like(v)[:, :2],
    "expanded": lambda v: v[:, :1].expand(-1, 4) + v[:, :1].expand(len(v), 4),
    "flattened": lambda v: (v.reshape(-1, 1) * 2).view_as(v),
    "stacked": lambda v: torch.stack([v, -v]).square().sum(0),
    "sums": lambda v: [v.sum(1), v.sum(1, keepdim=True), v.mean(1), v.amax(1), v.all(1), v.norm(dim=1)],
    "classes": lambda v: [v.softmax(1), v.log_softmax(1), v.logsumexp(1), v.argmax(1), v.sort(1)[0], v.cumsum(1)],
    "largest of a row": lambda v: list(v.max(1)),
    "product": lambda v: v @ torch.arange(6.0, dtype=v.dtype).reshape(3, 2),
    "product with a vector": lambda v: v @ torch.arange(3.0, dtype=v.dtype),
    "vector times columns": lambda v: torch.arange(3.0, dtype=v.dtype) @ v.T,
    "batch": lambda v: torch.einsum("ij,ik,k->ij", v, v, torch.arange(3.0, dtype=v.dtype)),
    "matrices": lambda v: torch.diag_embed(v) @ v[:, :, None],
    "functions": lambda v: torch.nn.functional.logsigmoid(v) + torch.special.xlogy(v.abs(), v.abs() + 1),
    "over the samples": lambda v: [v.sum(), v.sum(0), v.max(), v.amin(0), (v > 9).any(), (v < 9).all(0)],
    "dtype of a sum": lambda v: [(v > 0).sum(), v.sum(dtype=torch.float32), v.float().sum(0)],
    "products over the samples": lambda v: [v.T @ v, v[:, 0] @ v, v[:, 0] @ v[:, 1], v.new_ones(len(v)) @ v],
    "einsum over the samples": lambda v: torch.einsum("ij,ik->jk", v, v.abs()),
    "added product": lambda v: torch.ones(3, 3, dtype=v.dtype).addmm_(v.T, v, alpha=2),
    "logarithm of sums": lambda v: [v.logsumexp(0), v.logsumexp(0, keepdim=True), (v - torch.inf).logsumexp(0)],
    "nan": lambda v: torch.where(v == v.max(), torch.nan, v).amax(),
    "added product of nothing": lambda v: torch.full((3, 3), torch.nan, dtype=v.dtype).addmm_(v.T, v, beta=0),
    "positions from the end": lambda v: v[:, torch.tensor([-1, 0])],
    "without axes of one": lambda v: [v[:, :1].squeeze(1), v[:, None].squeeze(1)],
    "size of no number": lambda v: [v.view(len(v), -1), v.view(-1), v.view(-1, 3, 1)],
    "entries": lambda v: (2 * v).gather(1, (v[:, :1] > 0).long()),
    "entries of plain values": lambda v: _numbered(len(v)).gather(1, (v[:, :2] > 0).long()),
    "columns in another order": lambda v: (v[:, :, None] * _numbered(4).T[:3]).reshape(len(v), -1),
    "plain values that change": lambda v: _changed_after(v, _numbered(len(v))),
    "equal": lambda v: torch.tensor(v.equal(v + 0) and not v.equal(v + 1)),
    "of no sample": lambda v: v.new_zeros(7),
    "of no value": lambda v: torch.stack([v, v, v])[::2][:0].sum(0),
}
GATHERED = {
    "entries of some rows": lambda v: _numbered(len(v) + 2).gather(1, (v[:, :1] > 0).long()),
    "chosen by a mask": lambda v: v[v[:, 0] > 0],
    "some rows": lambda v: v[2:5] + v[torch.tensor([1, 0, 2])],
    "one row": lambda v: v[0] + v[7],
    "in another order": lambda v: v[:, 0][torch.arange(len(v) - 1, -1, -1)],
    "positions in two axes": lambda v: v[:, torch.tensor([[2, 0], [1, 1]])],
    "positions by pairs": lambda v: v[torch.arange(len(v)), v.argmax(1)],
    "entries of the first rows": lambda v: v[:, :2].reshape(-1, 1).gather(1, (v[:, :1] > 99).long()),
    "sorted": lambda v: v.sort(0)[0],
    "sums up to each": lambda v: v.cumsum(0),
    "median": lambda v: v.median(0)[0],
    "positions": lambda v: (v[:, 0] > 0).nonzero(),
    "all pairs": lambda v: v @ v.T,
    "differences of all pairs": lambda v: v[:, None] - v[None],
    "added to plain values": lambda v: torch.ones(len(v), 3, dtype=v.dtype).add_(v),
    "rows apart": lambda v: v.unbind(0)[1:3],
    "diagonal": lambda v: [v.diagonal() + 1, v.diagonal(dim1=1, dim2=0) + 1],
    "columns after each other": lambda v: v.T.contiguous().view(-1),
    "solution": lambda v: torch.linalg.lstsq(v, v[:, :1]).solution,
    "spread": lambda v: v.std(0),
    "mean over the samples": lambda v: v.mean(),
    "norm over the samples": lambda v: [(v / 0).norm(), (v / 0).norm(dim=0), (v * torch.nan).norm()],
    "sum with a product": lambda v: torch.addmm(torch.full((3, 3), torch.nan, dtype=v.dtype), v.T, v, beta=0),
    "without all axes of one": lambda v: [v[:, :1].squeeze(), v[:, None, :1].squeeze((1, 2))],
    "rows in a new place": lambda v: torch.cat([v, v]),
    "array": lambda v: torch.from_numpy(v.numpy() + 1),
}
OPERATIONS |= GATHERED


def _changed(v, change):
    other, view = v.clone(), v.T
    change(v)
    return [v, view, v.sum(0), other]


CHANGES = {
    f"change: {name}": lambda v, change=change: _changed(v, change)
    for name, change in {
        "add": lambda v: v.add_(1).mul_(v),
        "copy": lambda v: v.copy_(v.flip(0)),
        "copy of a row": lambda v: v.copy_(torch.arange(3.0, dtype=v.dtype)),
        "fill": lambda v: v.fill_(2),
        "column": lambda v: v[:, 1].zero_(),
        "columns": lambda v: v[:, 1:].mul_(3),
        "transpose": lambda v: v.T.add_(torch.ones(3, 1, dtype=v.dtype)),
        "flattened": lambda v: v.view(-1).exp_(),
        "no view": lambda v: v.T.contiguous().zero_(),
        "chosen rows": lambda v: v.__setitem__(torch.tensor([4, 0]), 5.0),
        "mask": lambda v: v.__setitem__(v > 0, 0.0),
        "out": lambda v: torch.add(v, 1, out=v),
        "list": lambda v: torch._foreach_add_([v, v.clone()], 1),
        "list after a look": lambda v: (v.tolist(), torch._foreach_mul_([v], 2)),
        "mask of none": lambda v: v.__setitem__(v[:, 0] > 99, v[v[:, 0] > 99]),
        "several outs": lambda v: torch.max(v.clone(), 1, out=(v[:, 0], torch.empty(len(v), dtype=torch.int64))),
        "view after a look": lambda v: (v.tolist(), v.T.mul_(2)),
    }.items()
}
CHANGED_ON_RANK_0 = {
    f"change: {name}"
    for name in (
        "copy",
        "chosen rows",
        "list",
        "list after a look",
        "mask",
        "mask of none",
        "several outs",
        "view after a look",
    )
}


def _stale(v):
    view = v[:5]
    v.mul_(2)
    return view + 0


REFUSED = {
    "rows": lambda v: v[3:5].zero_(),
    "out": lambda v: torch.add(v[:, 0], 1, out=v[3:5, 0]),
    "read": _stale,
    "two views": lambda v: torch._foreach_add_([v, v.T], 1),
    "axis": lambda v: v.unsqueeze_(1),
    "array": lambda v: v.numpy().fill(1),
    "repeated": lambda v: v[:, :1].expand(-1, 3).copy_(v),
    "position": lambda v: v[:, torch.tensor([3])],
    "position before the first": lambda v: v[:, torch.tensor([-4])],
    "mask": lambda v: v[:, torch.tensor([True, False])],
    "shape": lambda v: v.view(-1, 4 * len(v)),
    "shape of nothing": lambda v: v[:, :0].view(-1, 0),
}
