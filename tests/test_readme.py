"""The README's example runs as it stands."""

import pathlib
import re

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_the_example_runs(capsys):
  blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
  (example,) = [block for block in blocks if "import jax" in block]
  exec(compile(example, str(README), "exec"), {})
  loss, stats = capsys.readouterr().out.split(" ", 1)
  assert 0 < float(loss) < 2 and "padding_ratio" in stats
