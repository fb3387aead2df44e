"""Names of attributes and methods in former versions, which classes of users may have."""

import torch
from solver_cases import make_program

from convexformer_solvers import GroupL2, Squared


def test_attributes_that_are_set_under_former_names_hold():
    class Coupled(Squared):
        separable = False

    class Whole(GroupL2):
        separable, by_block = False, False

    assert not Coupled.output_separable
    assert (Whole.output_separable, Whole.block_separable) == (False, False)
    assert Squared.output_separable
    assert GroupL2.block_separable


def test_the_adjoint_has_its_former_name():
    program = make_program("squared", "group_l2")
    assert torch.equal(program.pull_back(program.y), program.weighted_adjoint(program.y))
