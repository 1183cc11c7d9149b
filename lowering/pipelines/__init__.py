"""Pipelines: schedules as data. No module here imports graphs, programs or devices.

A `Schedule` has a row of actions per stage, in the notation of PyTorch's pipelining:

    schedule = named("1f1b", stages=4, microbatches=8)      # or csv_files.read("mine.csv")
    check(schedule)                                         # raises at the first wrong action
    plan(schedule, Costs(forward=2, inputs=2, weights=2))   # makespan, bubble, live activations
    print(show(schedule))                                   # rows of stages over time slots

| module | has |
|---|---|
| `actions.py`, `schedule.py` | `Action`, `Schedule` |
| `csv_files.py` | reads and writes PyTorch's CSV files |
| `named.py` | `named`: a built-in schedule by its name |
| `one_chunk.py`, `interleaved.py`, `zero_bubble.py`, `circular.py` | built-in schedules |
| `groups.py` | groups of microbatches, for stages with several chunks |
| `dependencies.py` | which results an action needs, and which message carries a result |
| `messages.py` | adds sends and receives |
| `buffers.py` | how many inputs are live, and which values share a buffer |
| `checks/checking.py` | `check`; it uses `rules.py`, `message_rules.py` and `deadlocks.py` |
| `checks/faults.py` | `Fault`: an error in a schedule |
| `planning.py` | `plan`: a `Plan` (`plans.py`) of a schedule with `Costs` (`costs.py`) |
| `printing.py` | `show`: a schedule as text |
| `running.py` | the facts of a pipeline that a program runs |

`lowering.pipelining` makes programs of them: all stages share ticks (`clocking`, `timetable`).
"""
