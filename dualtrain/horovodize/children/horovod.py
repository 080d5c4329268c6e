"""What a spawned process of a script finds as ``horovod``: it installs the hook there and gives way to it."""

import sys
from importlib import import_module

from dualtrain.horovodize.imports import install

del sys.modules[__name__]
install()
import_module(__name__)
