"""`driftlens.base.diagnostic` by the name that plug-ins and notebooks know."""

import sys

from driftlens.base import diagnostic

sys.modules[__name__] = diagnostic
