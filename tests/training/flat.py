"""Training with all options side by side, each given to the record that it is a setting of."""

from meshdsl.training import Data, Evaluation, Health, Recipe, Reporting
from meshdsl.training.loop import train as train_with_records
from meshdsl.training.settings import settings


def train(init, loss, optimizer, batches, *, steps, **options):
    """Trains with options such as `seed=1, log_every=3, eval_batches=...`."""

    def made(record, *given):
        own = {name: options.pop(name) for name in settings(record) if name in options}
        return record(*given, **own)

    recipe, data = made(Recipe, init, loss, optimizer), made(Data, batches)
    records = {"evaluation": made(Evaluation), "reporting": made(Reporting)}
    records["health"] = made(Health)
    return train_with_records(recipe, data, steps=steps, **records, **options)
