"""Builds wheels by scikit-build-core, and no source distributions: the sources are those of the whole repository."""

from scikit_build_core.build import *  # noqa: F403


def build_sdist(sdist_directory, config_settings=None):
    raise SystemExit("flashjit has no source distribution: a wheel of a clone (pip wheel runtime/python) would work")
