"""Printed numbers compared with a tolerance, as their last digits differ between processors."""

import doctest
import re

import pytest

NUMBER = re.compile(r"\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+")


class AlikeChecker(doctest.OutputChecker):
    """Decimal numbers may differ by one per cent or 2e-5; integers and text are compared as they are."""

    def check_output(self, want, got, optionflags):
        pairs = zip(NUMBER.findall(want), NUMBER.findall(got), strict=False)
        alike = all(float(left) == pytest.approx(float(right), rel=1e-2, abs=2e-5) for left, right in pairs)
        return alike and super().check_output(NUMBER.sub("#", want), NUMBER.sub("#", got), optionflags)
