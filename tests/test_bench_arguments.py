"""What users may type wrong for a benchmark is told in one line."""

import json

import pytest

pytest.importorskip("rich")
pytest.importorskip("allpairspy")
pytest.importorskip("bench", reason="the sources are not beside the tests")

from bench import __main__ as whole
from bench import bars, choices, decode


@pytest.mark.parametrize(
    ("module", "options", "text"),
    [
        (whole, ["--rows", "0"], "argument --rows: a number must be a whole one from 1 on; got '0'"),
        (whole, ["--rows", "1,x"], "got 'x'"),
        (whole, ["--shapes", "0x4"], "argument --shapes: a number must be a whole one from 1 on; got '0'"),
        (whole, ["--shapes", "64"], "a shape must be N x K, 4096x4096 say; got '64'"),
        (decode, ["--batches", "0"], "argument --batches: a number must be a whole one from 1 on; got '0'"),
        (choices, ["--rows", "-1"], "got '-1'"),
    ],
)
def test_numbers(run_small, capsys, module, options, text):
    with pytest.raises(SystemExit):
        run_small(module, *options)
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "no JSON", json.dumps([1]), json.dumps({"rows": []})])
def test_files(run_small, tmp_path, content):
    file = tmp_path / "result.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit, match=r"bench: .*result\.json is no result of a benchmark"):
        run_small(whole, "--plot", str(file))
    with pytest.raises(SystemExit, match=r"bench\.choices: .*result\.json is no result of a benchmark"):
        run_small(choices, "--of", str(file))
    with pytest.raises(SystemExit, match=r"bench\.bars: .*result\.json is no result of a benchmark"):
        run_small(bars, "--of", str(file))


def test_isa(run_small):
    for module, name in ((whole, "bench"), (choices, "bench.choices")):
        with pytest.raises(SystemExit, match=rf"{name}: --isa must be one of .*portable; got foo"):
            run_small(module, "--platform", "cpu", "--isa", "foo")
