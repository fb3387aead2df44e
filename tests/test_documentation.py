"""The README's example runs as printed, and its set-up commands are those that CI runs."""

import doctest
import re
import subprocess
from pathlib import Path

import numpy as np
from alike import AlikeChecker

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_there_are_the_four_examples():
    assert len(list((ROOT / "examples").glob("plot_*.py"))) >= 4


def test_readme_example_runs_and_says_what_it_prints(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert code.count("\n") <= 15
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    (gap,) = re.findall(r"^Certificate\(primal=.*relative_gap=(\d(?:\.\d+)?e-\d+)\)$", printed[0])
    assert 0 <= float(gap) <= 1e-4
    promised = re.findall(r"Certificate\(.*\)", README)
    assert len(promised) == 2  # in the example and where it is explained
    for line in promised:
        assert AlikeChecker().check_output(line, printed[0], 0)
    assert float(printed[1]) > 0.9
    assert printed[2].endswith("49 tokens, 4 features, 10 outputs)")
    explained = np.array(" ".join(printed[3:]).strip("[] ").split(), dtype=float)
    probe, X_test = names["probe"], names["X_test"]
    largest = probe.decision_function(X_test)[0].argmax()
    np.testing.assert_allclose(explained, probe.explain(X_test).of(0, largest), atol=0.051)
    (sequel,) = re.findall(r"```text\n(>>> .*?)```", README, re.DOTALL)
    test = doctest.DocTestParser().get_doctest(sequel, dict(names), "README.md", None, None)
    assert doctest.DocTestRunner(AlikeChecker()).run(test).failed == 0


def test_readme_is_short():
    assert len(README.split()) <= 800


def test_ci_runs_the_two_commands_of_the_readme():
    commands = [line for line in README.splitlines() if line.startswith("python -m pip install -c constraints.txt ")]
    assert len(commands) == 2
    assert commands[0].endswith("&& convexformer demo")
    assert "pytest" in commands[1]
    gate = (ROOT / ".ci" / "run").read_text()
    assert "README.md" in gate
    assert subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=False).returncode == 0
