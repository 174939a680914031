"""`driftlens.front.estimators` by the name that plug-ins and notebooks know."""

import sys

from driftlens.front import estimators

sys.modules[__name__] = estimators
