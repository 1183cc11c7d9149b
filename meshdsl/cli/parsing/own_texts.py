"""Help texts of flags that mean something of its own to a command: by flag, then by commands.

`table` has the text of each flag for all commands together, which the reference shows. The help of
a command shows the text here, if it has one. A key names the commands of a text, between blanks.
"""

from __future__ import annotations

from collections.abc import Mapping

_STEP = "train explain compile plan explore sweep"  # commands that have a training step
_READS_RUNS = "Folder of a run, whose latest checkpoint is read. --step chooses another one."
_SEVERAL = "several: the flag again, alternatives in braces"
_STDOUT = "`-` is standard output; all else is then on standard error."

_TEXTS: Mapping[str, Mapping[str, str]] = {
    "mesh_shape": {
        "train explain compile plan": 'Mesh axes and their sizes: "data:2,model:4"; or auto: the '
        "best that is found.",
        "generate serve evaluate": 'Mesh axes and their sizes: "data:2,model:4".',
        "sweep explore": f'Mesh axes and their sizes: "data:2,model:4"; {_SEVERAL} '
        "(data:{2,4},model:2), or files with one on each line.",
    },
    "layout": {
        "train explain compile plan": 'Dims split over mesh axes: "batch:data; heads:model". auto: '
        'the best that is found, with what is written beside it: "batch:data; auto".',
        "generate serve evaluate": 'Dims split over mesh axes: "batch:data; heads:model".',
        "sweep explore": f'Dims split over mesh axes: "batch:data; heads:model"; {_SEVERAL} '
        "(heads:{model,-}), or files with one on each line, which may be a pair, `mesh | layout`.",
    },
    "batch_size": {
        f"{_STEP} evaluate": "Sequences in a batch. Default: the model's.",
        "generate": "Texts that are written at once. Default: 8.",
        "serve": "Texts that are written at once. Default: 8.",
    },
    "length": {
        _STEP: "Tokens in a sequence. Default: the model's.",
        "serve": "Tokens of a text, with its prompt. Default: 1,024, or the positions of the "
        "model, if these are fewer.",
        "evaluate": "Tokens in a sequence. Default: the model's; of --tasks, up to 2,048.",
    },
    "workdir": {
        "train": "Folder for metrics.jsonl, TensorBoard and checkpoints; a run whose checkpoints "
        "are there goes on. Default: none is written.",
        "sweep": "Folder for sweep.csv, sweep.json, plot.svg and index.html; a sweep whose results "
        "are there goes on. Default: none is written.",
        "generate serve evaluate": _READS_RUNS,
        "export": "Folder of the run to export, whose latest checkpoint is read. --step chooses "
        "another one.",
        "runs plot": "One more folder of runs, beside those that the command names.",
    },
    "out": {
        "export": "Where to write: a .safetensors file, or a folder for several.",
        "generate": f"File to write the texts to, as lines of JSON. {_STDOUT}",
        "evaluate": f"File to write the numbers to, .json. {_STDOUT}",
        "calibrate": "File to write the measurements to, .json, for --hardware.",
        "plot": "File to draw: .svg, .png, .pdf or .html.",
    },
    "step": {
        "export": "Step of the checkpoint to export; best: the one with the least eval_loss. "
        "Default: the latest.",
        "generate serve evaluate": "Step of the checkpoint to read; best: the one with the least "
        "eval_loss. Default: the latest.",
    },
    "port": {
        "serve": "Port on which it listens; 0: one that is free.",
        "explore": "Port of the page of --live. Default: one that is free.",
    },
    "html": {
        "explain": "File to write as one HTML page, instead of text.",
        "compile": "File to write as one HTML page, beside the text.",
        "explore": "File of the page. Default: explore.html; with --live no file.",
    },
    "against": {
        "compile": "A second program to compare with: jax_auto (XLA splits the tensors), or plain "
        "JAX, `my_step.py:program`: given a jax.sharding.Mesh, it returns what jax.jit returned, "
        "and its arguments.",
        "plan": 'A layout to compare with, "batch:data; heads:model", or `mesh | layout`.',
    },
}
OWN: Mapping[tuple[str, str], str] = {
    (command, flag): text
    for flag, texts in _TEXTS.items()
    for commands, text in texts.items()
    for command in commands.split()
}
