"""`driftlens.runs.run` by the name that plug-ins and notebooks know."""

import sys

from driftlens.runs import run

sys.modules[__name__] = run
