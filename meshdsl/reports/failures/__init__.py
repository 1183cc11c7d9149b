"""What lost hosts cost: who holds the state, and how much of a job's time failures leave."""

from meshdsl.reports.failures.goodput import Faults as Faults
from meshdsl.reports.failures.goodput import Shares as Shares
from meshdsl.reports.failures.goodput import shares as shares
from meshdsl.reports.failures.prediction import Costs as Costs
from meshdsl.reports.failures.prediction import Prediction as Prediction
from meshdsl.reports.failures.prediction import predict as predict
from meshdsl.reports.failures.states import Failures as Failures
from meshdsl.reports.failures.states import failures as failures
from meshdsl.reports.failures.text import show as show
from meshdsl.reports.failures.values import as_values as as_values
