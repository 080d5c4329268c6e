"""The module ``horovod`` in a script's spawned processes. It installs the import hook, which replaces this module."""

import sys
from importlib import import_module

from dualtrain.horovodize.imports import install

del sys.modules[__name__]
install()
import_module(__name__)
