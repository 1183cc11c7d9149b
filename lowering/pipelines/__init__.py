"""Pipelines: schedules as data. This folder knows nothing of graphs, programs and devices.

A `Schedule` has a row of actions per stage, in the notation of PyTorch's pipelining:

    schedule = named("1f1b", stages=4, microbatches=8)      # or csv_files.read("mine.csv")
    check(schedule)                                         # right, or the first wrong action
    plan(schedule, Costs(forward=2, inputs=2, weights=2))   # makespan, bubble, live activations
    print(show(schedule))                                   # rows of stages over time slots

| module | has |
|---|---|
| `actions.py`, `schedule.py` | `Action`, `Schedule` |
| `csv_files.py` | reads and writes PyTorch's CSV files |
| `named.py` | `named`: built-in schedules by name |
| `one_chunk.py`, `interleaved.py`, `zero_bubble.py`, `circular.py` | built-in schedules |
| `groups.py` | groups of microbatches, for stages with several chunks |
| `dependencies.py` | what an action needs, and which message carries it |
| `messages.py` | adds sends and receives |
| `buffers.py` | which inputs are live, and in which buffer each of them is |
| `checking.py` | `check`; parts of it are `rules.py`, `message_rules.py`, `deadlocks.py` |
| `faults.py` | what is wrong with a schedule |
| `planning.py` | `plan` makes a `Plan` (`plans.py`) of `Costs` (`costs.py`) |
| `printing.py` | `show` |

To lower a schedule, there are two ways.

* `circular.Circular` has three loops. `forward(tick, stage)` and `backward(tick, stage)` are
  arithmetic, so a traced tick and a traced stage will do. In each tick, what stage s - 1 did in the
  tick before comes to stage s (backward: from s + 1). What came is the input of the next chunk, so
  its (chunk, microbatch) follow from `forward(tick - 1, stage - 1)`; `input_buffers` says where it
  is kept. The result of the last chunk is the loss's, and what comes from it to stage 0 is dropped.
* Any other schedule needs a table: `plan(schedule).spans` has a time for each action, and
  `messages.with_messages(schedule)` an order of sends and receives that needs no buffer on the way.
  `buffers.input_buffers` says where inputs are kept.
"""
