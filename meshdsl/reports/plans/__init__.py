"""What a search has found: the best plans of a training step, and why they are the best."""

from meshdsl.reports.plans.figures import Figures as Figures
from meshdsl.reports.plans.figures import Heading as Heading
from meshdsl.reports.plans.figures import figures as figures
from meshdsl.reports.plans.rules import Without as Without
from meshdsl.reports.plans.text import show as show
from meshdsl.reports.plans.text import show_against as show_against
from meshdsl.reports.plans.text import show_remedies as show_remedies
from meshdsl.reports.plans.values import as_values as as_values
