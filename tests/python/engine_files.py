"""Files of an inference engine's wheel, imported without the rest of the engine, of which a CPU lacks most."""

import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from unittest import mock


class StandIn(types.ModuleType):
    """A module each of whose names is a mock."""

    __path__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = mock.MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class Finder:
    """Imports modules in `real` from the folder, and stands in for the engine's others."""

    def __init__(self, folder, engine, real):
        self.folder, self.engine, self.real = Path(folder), engine, set(real)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != self.engine:
            return None
        if name in self.real:
            place = self.folder / (name.replace(".", "/") + ".py")
            place = place if place.exists() else self.folder / name.replace(".", "/") / "__init__.py"
            packaged = [str(place.parent)] if place.name == "__init__.py" else None
            return importlib.util.spec_from_file_location(name, place, submodule_search_locations=packaged)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


def offer(folder, engine, real):
    sys.meta_path.insert(0, Finder(folder, engine, real))
