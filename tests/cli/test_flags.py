"""The flags are a promise: these names, these defaults. A change here is one for every user."""

from dataclasses import fields

import pytest

from meshdsl.cli import flags
from meshdsl.cli.main import run
from meshdsl.cli.mistakes.other_commands import of_other_commands
from meshdsl.cli.mistakes.problems import Problems, UsageError
from meshdsl.cli.parsing.table import FLAGS
from meshdsl.lowering.options import Options

PROMISED = {
    "model": "gpt_mini",
    "lora": None,
    "model_args": "",
    "mesh_shape": None,
    "layout": None,
    "memory": None,
    "weights": "auto",
    "bucket_bytes": None,
    "overlap": False,
    "prefetch": False,
    "context": "auto",
    "zigzag": False,
    "reduce_dtype": "auto",
    "pipeline": "auto",
    "pipeline_rounds": None,
    "halves": "auto",
    "compiler_flags": (),
    "microbatches": 1,
    "remat": None,
    "host_devices": None,
    "backend": "jax",
    "tpu": None,
    "coordinator": None,
    "num_processes": None,
    "process_id": None,
    "join_timeout": 60,
    "pause_timeout": 120,
    "policy": None,
    "precision": None,
    "seed": 0,
    "data": None,
    "data_column": "text",
    "data_cache": None,
    "data_workers": 0,
    "tokenizer": None,
    "end_token": None,
    "begin_documents": False,
    "split": None,
    "packing": False,
    "batch_size": None,
    "batch_ramp": None,
    "length": None,
    "steps": 200,
    "learning_rate": 1e-3,
    "schedule": "cosine",
    "min_learning_rate": None,
    "warmup_steps": None,
    "decay_steps": None,
    "optimizer": None,
    "weight_decay": 0.1,
    "weight_decay_except": (),
    "ema_decay": None,
    "clip_norm": 1.0,
    "nonfinite": "stop",
    "loss_scale": None,
    "initial_loss_scale": 2.0**32,
    "min_loss_scale": 1.0,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "extra_metrics": (),
    "trainable": None,
    "steps_per_call": 1,
    "log_every": 10,
    "eval_every": 100,
    "eval_batches": 20,
    "workdir": None,
    "checkpoint_every": None,
    "checkpoint_minutes": None,
    "keep": 3,
    "keep_best": 1,
    "local_checkpoints": None,
    "local_every": None,
    "host_copies": None,
    "init_from": None,
    "prompt": None,
    "prompts": None,
    "max_tokens": 200,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "beams": 1,
    "length_penalty": 1.0,
    "stop": None,
    "tasks": None,
    "num_fewshot": None,
    "limit": None,
    "chat": False,
    "out": None,
    "step": None,
    "ema": False,
    "format": "meshdsl",
    "dtype": None,
    "max_shard_size": 5 * 10**9,
    "resume": True,
    "override": False,
    "exit_after_minutes": None,
    "exit_at_step": None,
    "grace": None,
    "profile_steps": None,
    "replica_check_every": None,
    "straggler_factor": None,
    "straggler_steps": 20,
    "step_timeout": None,
    "processes": 1,
    "first_process": 0,
    "max_restarts": 10,
    "restart_window": 3600,
    "elastic_axis": None,
    "shrink_after": 10.0,
    "compile_ahead": True,
    "spare": False,
    "html": None,
    "compare_layout": None,
    "only": "",
    "stage": None,
    "pipeline_table": None,
    "decode": False,
    "against": None,
    "hardware": "v5p",
    "batch_tokens": None,
    "search_seconds": None,
    "within": None,
    "simplify": None,
    "chat_template": None,
    "host": "127.0.0.1",
    "port": 8000,
    "waiting": 64,
    "cache_tokens": None,
    "json": False,
    "minutes": 10.0,
    "plans": 200,
    "live": False,
    "failures": False,
    "mtbf": None,
    "job_mtbf": None,
    "devices_per_host": None,
    "storage_bandwidth": 10**9,
    "restart_time": 300,
    "topology": None,
    "slices": 1,
    "measure": "plan",
    "parallel": None,
    "rounds": 5,
    "debug": False,
    "config": None,
    "print_config": False,
    "help": False,
    "h": False,
}


def problems_of(*arguments):
    return flags.read(arguments)[1].found


def test_the_flags_and_their_defaults_are_these():
    values, problems = flags.read([])
    assert problems.found == []
    assert {name: values[name].value for name in values} == PROMISED


def test_every_option_of_lowering_has_a_flag_with_its_default_and_its_help():
    values, _ = flags.read([])
    for field in fields(Options):
        if field.name == "hardware":  # set by --hardware, and by the machine of --topology
            continue
        assert values[field.name].value == field.default
        assert "See `" not in FLAGS[field.name][2]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 * 2**30),
        ("95GB", 95 * 10**9),
        ("95 gb", 95 * 10**9),
        ("1.5MiB", 3 * 2**19),
        ("25kB", 25_000),
        ("2TiB", 2**41),
        ("4_096", 4096),
        ("4096B", 4096),
        ("0", 0),
    ],
)
def test_sizes_are_numbers_of_bytes(text, size):
    values, problems = flags.read([f"--memory={text}"])
    assert problems.found == []
    assert values.memory == size


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--overlap", True),
        ("--overlap=true", True),
        ("--overlap=no", False),
        ("--nooverlap", False),
    ],
)
def test_what_is_true_or_false_needs_no_value(argument, said):
    values, problems = flags.read([argument, "--steps=3"])
    assert (problems.found, values.overlap, values.steps) == ([], said, 3)


def test_values_are_read_into_what_they_mean():
    values, problems = flags.read(
        ["--mesh_shape=data:2,model:4", "--layout", "batch:data; length:model?", "--steps=1_000"]
    )
    assert problems.found == []
    assert values.mesh_shape.sizes == {"data": 2, "model": 4}
    assert str(values.layout) == "batch:data; length:model?"
    assert values.steps == 1000
    values, problems = flags.read(["--remat=names:a,b", "--weight_decay_except=x, blocks/*/y,"])
    assert problems.found == []
    assert (values.remat, values.weight_decay_except) == ("names:a+b", ("x", "blocks/*/y"))


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("--modl=x", "unknown flag --modl. Did you mean `--model`?"),
        ("--nonsense", "unknown flag --nonsense"),
        ("train", "'train' is not a flag; flags are written --name=value"),
        ("--model", "Missing value for flag --model"),
        ("--steps=many", "--steps: needs a whole number of at least 1, got 'many'"),
        ("--steps=0", "--steps: needs a whole number of at least 1, got '0'"),
        (
            "--checkpoint_every=10min",
            "--checkpoint_every: counts steps: needs a whole number of at least 1, got '10min'. "
            "For a time write --checkpoint_minutes=10",
        ),
        (
            "--checkpoint_minutes=0",
            "--checkpoint_minutes: needs a number of minutes above 0, or a time, as 90s, got '0'",
        ),
        ("--checkpoint_minutes=soon", "--checkpoint_minutes: needs a time, as 50000h or 5min"),
        ("--log_every=0", "--log_every: needs a whole number of at least 1, got '0'"),
        ("--learning_rate=-1", "--learning_rate: needs a number of at least 0, got '-1'"),
        ("--weight_decay=nan", "--weight_decay: needs a number of at least 0, got 'nan'"),
        ("--memory=16GIB/2", "--memory: needs a size, as 16GiB, 95GB or 4096 (units: B, kB,"),
        ("--memory=lots", "--memory: needs a size, as 16GiB, 95GB or 4096 (units: B, kB,"),
        ("--bucket_bytes=-1", "--bucket_bytes: needs a size, as 16GiB, 95GB or 4096 (units: "),
        ("--overlap=maybe", "--overlap: needs true or false, got 'maybe'"),
        (
            "--weights=kept",
            "--weights: unknown choice 'kept'; choose one of auto, again, keep. Did you mean "
            "`keep`?",
        ),
        ("--context=rings", "--context: unknown choice 'rings'; choose one of auto, ring, gather,"),
        ("--remat=keep", "--remat: unknown choice 'keep'; choose one of none, full, dots, keep_co"),
        ("--remat=names:", "--remat: 'names:': give names, of attention_query, attention_key, "),
        ("--schedule=cosin", "--schedule: unknown choice 'cosin'; choose one of cosine, linear,"),
        ("--nonfinite=go", "--nonfinite: unknown choice 'go'; choose one of stop, skip"),
        ("--loss_scale=-2", "--loss_scale: needs a number of at least 0, got '-2'"),
        (
            "--extra_metrics=num_zeros,norm",
            "--extra_metrics: unknown choice 'norm'; choose from num_zeros, params_norm",
        ),
        ("--microbatches=0", "--microbatches: needs a whole number of at least 1, got '0'"),
        (
            "--split=0,50",
            "--split: needs the parts for training, validation and test, as 949,50,1, the first "
            "of them above 0; got '0,50'",
        ),
        ("--packing=often", "--packing: needs true or false, got 'often'"),
        ("--data_workers=-1", "--data_workers: needs a whole number of at least 0, got '-1'"),
        ("--max_shard_size=big", "--max_shard_size: needs a size, as 16GiB, 95GB or 4096 (units: "),
        ("--dtype=int8", "--dtype: needs a floating-point dtype, got 'int8'"),
        ("--dtype=float8_e5m2", "--dtype: needs a floating-point dtype, got 'float8_e5m2'"),
        ("--dtype=bfloat", "--dtype: unknown dtype 'bfloat'; choose one of bool, int8, "),
        ("--backend=nump", "--backend: unknown backend 'nump'; choose one of "),
        ("--policy=compute=int32", "--policy: policy compute=int32: needs a floating-point dtype"),
        (
            "--mesh_shape=data:2,model",
            "--mesh_shape: malformed mesh: expected `axis:size`, as in `data:2 model:4`\n"
            "  data:2,model\n"
            "         ^^^^^",
        ),
        ("--layout=batch", "--layout: malformed layout\n  batch\n  ^^^^^\n  `batch` is not of the"),
    ],
)
def test_a_mistake_is_reported_with_its_flag(argument, problem):
    (found,) = problems_of(argument)
    assert found.startswith(problem)


def test_only_a_sweep_takes_several_meshes_and_layouts():
    several = ["--layout=batch:data", "--mesh_shape=data:2", "--layout=a.txt", "--layout=batch"]
    values, problems = flags.read(several, "sweep")
    assert problems.found == []
    assert values.layout == ["batch:data", "a.txt", "batch"]
    assert values.mesh_shape == ["data:2"]
    assert problems_of(*several[:2], "--layout=heads:data") == [
        "--layout is given 2 times: only `sweep` takes several"
    ]
    assert problems_of("--steps=1", "--steps=2") == []  # of a number the last counts


def test_what_was_given_can_be_written_again():
    given = [
        "--policy=params=float32,compute=bfloat16",
        "--memory=16 GiB",
        "--overlap",
        "--steps=3",
    ]
    values, _ = flags.read([*given, "--layout=batch:data"], "sweep")
    again = flags.written(values)
    assert sorted(again) == sorted(
        [
            "--policy=params=float32,compute=bfloat16",
            "--memory=16 GiB",
            "--overlap=true",
            "--steps=3",
        ]
    )
    read, problems = flags.read(again)
    assert problems.found == []
    assert all(read[name].value == values[name].value for name in PROMISED if name != "layout")
    assert flags.written(flags.read(["--nooverlap"])[0]) == ["--overlap=false"]


def test_all_mistakes_are_found():
    found = problems_of("--modl=x", "--mesh_shape=data", "--layout=batch", "--steps=0")
    assert [problem.split(":")[0].split(".")[0] for problem in found] == [
        "unknown flag --modl",
        "--mesh_shape",
        "--layout",
        "--steps",
    ]


def test_one_problem_stands_alone_and_several_are_numbered():
    problems = Problems()
    problems.check()
    problems.add("--data: nothing there\n  at all")
    with pytest.raises(UsageError) as error:
        problems.check()
    assert str(error.value) == "--data: nothing there\n  at all"
    problems.add("and more")
    with pytest.raises(UsageError) as error:
        problems.check()
    assert str(error.value) == (
        "2 problems\n\n  1. --data: nothing there\n       at all\n  2. and more"
    )


def test_rounds_of_a_sweep_are_not_taken_for_those_of_a_pipeline(capsys):
    assert run(["explain", "--rounds=2", "--model=gpt_mini"]) == 2
    assert "The rounds of a pipeline are --pipeline_rounds" in capsys.readouterr().err
    assert not [*of_other_commands(["--rounds=2"], "sweep")]
    assert not [*of_other_commands(["--pipeline_rounds=2"], "train")]


@pytest.mark.parametrize("name", ["interleaved", "mine.csv"])
def test_a_schedule_of_a_pipeline_is_not_that_of_the_learning_rate(name):
    _, problems = flags.read([f"--schedule={name}"])
    assert f"is a schedule of a pipeline: --pipeline={name}. This" in problems.found[0]
