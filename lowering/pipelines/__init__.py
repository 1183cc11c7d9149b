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
| `checks/checking.py` | `check`; parts of it are `rules.py`, `message_rules.py`, `deadlocks.py` |
| `checks/faults.py` | what is wrong with a schedule |
| `planning.py` | `plan` makes a `Plan` (`plans.py`) of `Costs` (`costs.py`) |
| `printing.py` | `show` |
| `running.py` | the facts of a pipeline that a program runs |

`lowering.pipelining` runs them, on ticks that all stages share (`clocking`, `timetable`).
"""
