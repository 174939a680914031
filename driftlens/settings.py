"""`driftlens.base.settings` by the name that plug-ins and notebooks know."""

import sys

from driftlens.base import settings

sys.modules[__name__] = settings
