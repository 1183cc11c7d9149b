"""`meshdsl plan`: what it prints, what it keeps, and what it says where nothing fits."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from meshdsl.cli import main
from meshdsl.lowering.costs.units import show_seconds
from meshdsl.search.searching import Search

SMALL = "--model=gpt_mini", "--model_args=layers=2"
TINY = f"--model={Path(__file__).with_name('tiny_mlp.py')}:mlp"
FAST = "--microbatches=1", "--remat=none"  # which leave less to search
MACHINE = "--topology=v5e:2x2"


def run(capsys, *arguments, code=0):
    """Returns what the command prints."""
    assert main.run(["plan", *arguments]) == code
    printed = capsys.readouterr()
    return printed.out if code != 2 else printed.err


@pytest.mark.long
def test_the_report_has_the_plan_its_parts_the_runners_up_and_the_commands(capsys):
    text = run(capsys, *SMALL, MACHINE, *FAST, "--batch_tokens=8192")
    head, best, *rest = text.split("\n\n")
    assert head.startswith("gpt_mini (layers=2) on v5e:2x2: 4 devices of TPU v5e, batch 64 x 128")
    assert re.search(r"the best of [\d,]+ plans; \d+ were lowered", head)
    lines = [line.split()[0] for line in best.split("\n")[1:] if line[2] != " "]
    assert set(lines) >= {"mesh", "layout", "step", "memory", "limit"}
    assert "tokens/s" in best and "of the bf16 peak" in best
    assert any(part.startswith("runners-up: what makes them worse\n") for part in rest)
    (command,) = re.findall(r"meshdsl (train .*)", text)
    mesh = re.search(r"  mesh    (.*)", best)[1].replace(" ", ",")
    assert f'--mesh_shape="{mesh}"' in command and "--batch_size=64" in command
    assert (
        run(capsys, *SMALL, MACHINE, *FAST, "--batch_tokens=8192") == text
    )  # the same in every run


def test_the_dtype_is_told_and_what_half_precision_does(capsys):
    flags = (TINY, MACHINE, "--microbatches=1", "--search_seconds=1")
    head = " ".join(run(capsys, *flags).split("\n\n")[0].split())
    half = "--policy=params=float32,compute=bfloat16"
    assert re.search(r"batch \S+ .*?, in float32 the best of", head)
    assert head.endswith(f"to be faster: half precision moves half the bytes ({half})")
    assert json.loads(run(capsys, *flags, "--json"))["dtype"] == "float32"
    head = " ".join(run(capsys, *flags, half).split("\n\n")[0].split())
    assert ", in bfloat16 the best of" in head and "to be faster" not in head


@pytest.mark.long
def test_a_plan_may_have_to_be_surely_near_the_best(capsys, monkeypatch):
    monkeypatch.setattr("meshdsl.cli.planning.nearness._EVERY", 0.0)
    quick = json.loads(run(capsys, TINY, MACHINE, "--json"))
    assert quick["gap"] > 0.02
    assert main.run(["plan", TINY, MACHINE, "--within=1%"]) == 0
    text, says = capsys.readouterr()
    # Where the search comes to its end, the plan is the optimum.
    near = re.search(r"at most (\S+) % above the optimum", text)
    optimal = "and no other can be faster" in " ".join(text.split())
    assert float(near[1]) <= 1 if near else optimal
    assert re.match(r"at most \S+ % above the optimum; [\d,]+ plans? may be faster\n", says)
    assert "--within" not in text  # the commands that run the plan do not search


@pytest.mark.long
def test_fewer_rules_may_take_a_share_of_the_time(capsys):
    flags = (*SMALL, MACHINE, *FAST, "--batch_tokens=8192", "--json")
    fastest = json.loads(run(capsys, *flags))
    assert fastest["simplified_from"] is None
    simple = json.loads(run(capsys, *flags, "--simplify=100%"))
    before = simple["simplified_from"]
    assert before == {name: fastest["best"][name] for name in ("layout", "seconds")}
    assert simple["best"]["layout"].count(";") < before["layout"].count(";")
    assert simple["best"]["seconds"] <= 2 * before["seconds"]
    assert simple["gap"] >= fastest["gap"]
    times = [row["seconds"] for row in simple["front"]]
    assert times == sorted(times)
    text = run(capsys, *flags[:-1], "--simplify=100%")
    assert re.search(r"  simpler \d rules? instead of \d, .* slower than ", text)


@pytest.mark.parametrize("share", ["2", "-1%", "few%", "101%"])
def test_a_share_is_in_percent(capsys, share):
    error = run(capsys, TINY, MACHINE, f"--simplify={share}", code=2)
    assert f"--simplify: needs a share from 0% to 100%, as in 2%, got '{share}'" in error


@pytest.mark.long
def test_json_has_the_same_plan_and_what_explain_says_of_it(capsys):
    report = json.loads(run(capsys, *SMALL, MACHINE, "--microbatches=auto", "--json"))
    best = report["best"]
    assert best["fits"] and best["seconds"] <= min(row["seconds"] for row in report["others"])
    assert best["work_seconds"] + sum(w["seconds"] for w in best["waits"]) == pytest.approx(
        best["seconds"], rel=1e-6
    )
    assert sum(best["memory"].values()) == best["peak_bytes"]
    front = report["front"]
    assert [row["peak_bytes"] for row in front] == sorted(
        (row["peak_bytes"] for row in front), reverse=True
    )
    arguments = [f"--mesh_shape={best['mesh'].replace(' ', ',')}", f"--layout={best['layout']}"]
    arguments += [f"--microbatches={best['microbatches']}", "--hardware=v5e"]
    arguments += [f"--remat={best['remat']}"] if best["remat"] else []
    assert main.run(["explain", *SMALL, *arguments]) == 0
    simulated = re.search(r"simulated: ([\d.]+ m?µ?s) per step", capsys.readouterr().out)
    assert simulated[1] == show_seconds(best["seconds"])


@pytest.mark.long
def test_what_is_written_is_kept(capsys):
    given = "--layout=batch:rows; auto", "--mesh_shape=rows:2,cols:2", "--microbatches=2"
    best = json.loads(run(capsys, TINY, MACHINE, *given, "--json"))["best"]
    assert best["mesh"] == "rows:2 cols:2"
    assert best["layout"].startswith("batch:rows") and best["microbatches"] == 2
    best = json.loads(run(capsys, TINY, MACHINE, "--layout=", "--json"))["best"]
    assert best["layout"] and f'--layout="{best["layout"]}"' in best["commands"][0]  # nothing is
    best = json.loads(run(capsys, TINY, MACHINE, "--layout=d_ff:mine; auto", "--json"))["best"]
    assert best["layout"].startswith("d_ff:mine") and "mine:" in best["mesh"]
    given = "--layout=batch:data; d_ff:model", "--remat=full"
    best = json.loads(run(capsys, *SMALL, MACHINE, *given, "--json"))["best"]
    assert best["layout"] == "batch:data; d_ff:model" and best["remat"] is None
    assert "--remat=full" in best["commands"][0]


def test_slices_have_an_axis_of_their_own(capsys):
    best = json.loads(run(capsys, TINY, MACHINE, "--slices=2", "--json"))["best"]
    assert best["mesh"].startswith("slice@dcn:2") and "batch:slice" in best["layout"]


@pytest.mark.long
def test_another_layout_is_compared_and_every_rule_has_its_price(capsys):
    given = "--layout=batch:data; d_ff:model", "--mesh_shape=data:2,model:2"
    text = run(capsys, TINY, MACHINE, *given, "--against=batch:data; embed:model?")
    assert "against data:2 model:2 | batch:data; embed:model? (B)" in text
    assert re.search(r"on the wire: \d+ collectives change", text)
    prices = text.split("without one of its rules\n")[1].strip().split("\n")
    rules = re.search(r"  layout  (.*)", text)[1].split("; ")
    assert [line.split()[0] for line in prices] == ["without", *rules]
    assert "B is the " not in text
    mesh, layout = (re.search(rf"  {name} +(.*)", text)[1] for name in ("mesh", "layout"))
    text = run(capsys, TINY, MACHINE, *given, f"--against={mesh} | {layout}")
    assert "B is the best plan itself." in text and "flags of A" not in text
    text = run(capsys, TINY, MACHINE, "--against=rows:4 | batch:rows")
    assert "against rows:4 | batch:rows (B)" in text
    text = run(capsys, TINY, MACHINE, "--against=batch:rows; d_ff:cols")
    assert re.search(r"against rows:2 cols:2 \| batch:rows; d_ff:cols \(B\)", text)
    text = run(capsys, TINY, MACHINE, "--slices=2", "--against=batch:rows; d_ff:cols")
    assert re.search(r"against (rows|cols)@dcn:2 (rows|cols):4 \|", text)
    text = run(capsys, TINY, MACHINE, "--slices=2", "--against=batch:rows", code=2)
    assert "8 devices have no mesh of the axes rows, of which one goes across 2 slices" in text
    text = run(capsys, TINY, MACHINE, "--slices=2", "--against=rows:8 | batch:rows", code=2)
    assert "--against: mesh rows:8: " in text


def test_without_a_plan_that_fits_it_says_how_far_off_and_what_helps(capsys):
    given = TINY, MACHINE, "--memory=1MiB", "--layout=batch:data"
    text = run(capsys, *given, code=1)
    assert "no layout fits" in text and "1.0 MiB" in text
    assert "what makes it fit, the least change first" in text
    assert "  without --memory: " in text
    report = json.loads(run(capsys, *given, "--microbatches=1", "--json", code=1))
    assert "without --memory" in {row["change"] for row in report["remedies"]}
    text = run(capsys, TINY, "--topology=v5e:1x1", "--microbatches=1", "--batch_size=65536", code=1)
    assert re.search(r"  --microbatches=auto: ", text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--topology says what to plan for, as in --topology=v5p:8x8x16"),
        (["--topology=v5p:3x3x3"], "--topology: no topology v5p:3x3x3"),
        ([MACHINE, "--mesh_shape=data:3"], "mesh data:3 has 3 devices, but v5e:2x2 has 4"),
        ([MACHINE, "--batch_tokens=100"], "100 tokens are not in sequences of 128; 128 are"),
        ([MACHINE, "--batch_tokens=128", "--batch_size=1"], "give one"),
        ([MACHINE, "--layout=batch:data; embed:data; auto"], "both claim mesh axis `data`"),
        ([MACHINE, "--layout=bacth:data; auto"], "Did you mean `batch`?"),
        ([MACHINE, "--backend=jax_auto"], "XLA's choice"),
        ([MACHINE, "--against=batch"], "--against: "),
        (
            [MACHINE, "--against=data:8 | batch:data"],
            "mesh data:8 has 8 devices, but the plan is for v5e:2x2: 4",
        ),
        ([MACHINE, "--memory=17GiB"], "--memory=17.0 GiB is more than the 16.0 GiB that TPU v5e"),
        ([MACHINE, "--hardware=h100"], "--hardware: that of --topology is known"),
        (["--mesh_shape=data:4", "--slices=2"], "--slices are those of a --topology"),
    ],
)
def test_mistakes_are_explained(capsys, arguments, says):
    assert says in run(capsys, *SMALL, *FAST, *arguments, code=2)


def test_a_mistake_is_reported_once(capsys):
    text = run(capsys, "--model=nope", MACHINE, "--batch_tokens=128", code=2)
    assert "nope" in text and "--batch_tokens" not in text and "problems" not in text


def test_a_model_without_names_to_split_says_so(capsys, tmp_path):
    (tmp_path / "tiny.py").write_text(
        "import meshdsl as md\n"
        "from meshdsl.models.model import Model\n"
        "def init(key):\n    return {'w': md.zeros([])}\n"
        "def loss(params, batch):\n    return params['w'] * md.mean(batch['x'])\n"
        "tiny = Model('tiny', init, loss, 1, 1, lambda b, n: {'x': md.spec([], 'float32')})\n"
    )
    text = run(capsys, f"--model={tmp_path}/tiny.py:tiny", MACHINE, code=2)
    assert "nothing of this program can be split over 4 devices" in text


def test_a_search_that_is_stopped_has_its_best_so_far(capsys, monkeypatch):
    text = run(capsys, TINY, MACHINE, "--search_seconds=0")
    assert "stopped early: the best so far" in text
    lower = Search.program

    def interrupted(*arguments, **rest):
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(Search, "program", lower)
        return lower(*arguments, **rest)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Search, "program", interrupted)
    text = run(capsys, TINY, MACHINE, "--memory=1MiB", "--layout=batch:data", code=1)
    assert "no layout so far fits" in text and "makes it fit" not in text
    monkeypatch.setattr(Search, "program", interrupted)
    assert "stopped early: the best so far" in run(capsys, TINY, MACHINE)
    assert signal.getsignal(signal.SIGINT) is before


def test_auto_is_refused_where_nothing_is_searched(capsys):
    assert main.run(["generate", "--layout=auto"]) == 2
    assert "--layout=auto is for train, explain, compile, plan" in capsys.readouterr().err
