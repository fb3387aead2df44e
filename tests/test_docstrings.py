"""Every public class and function outside the solver layer has an example that runs."""

import doctest
import importlib
import inspect
import pkgutil

import convexformer


def public_classes_and_functions():
    """Those of every ``__all__`` of the package, but for those of the solver layer, by where they are defined."""
    modules = [module.name for module in pkgutil.walk_packages(convexformer.__path__, "convexformer.")]
    for module in map(importlib.import_module, ["convexformer", *(n for n in modules if not n.endswith("__main__"))]):
        for part in (getattr(module, name) for name in getattr(module, "__all__", ())):
            if (inspect.isclass(part) or inspect.isfunction(part)) and part.__module__.startswith("convexformer."):
                yield f"{part.__module__}.{part.__qualname__}", part


def runs(part):
    """Whether an example of a docstring is not skipped."""
    examples = doctest.DocTestParser().get_examples(part.__doc__ or "")
    return any(doctest.SKIP not in example.options for example in examples)


def test_every_public_name_has_an_example_that_runs():
    public = dict(public_classes_and_functions())
    assert len(public) > 150
    assert [name for name, part in sorted(public.items()) if not runs(part)] == []
