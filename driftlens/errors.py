"""`driftlens.base.errors` by the name that plug-ins and notebooks know."""

import sys

from driftlens.base import errors

sys.modules[__name__] = errors
