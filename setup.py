"""Build of the native part; everything else is in pyproject.toml.

Developers' loop: ``python setup.py build_ext --inplace``. Environment variables: ``MAX_JOBS``,
``CXX``, ``CXXFLAGS``, ``LDFLAGS``, ``CUDA_HOME``, ``FORCE_CUDA`` (1: an error without CUDA; 0: CPU
only), ``TORCH_CUDA_ARCH_LIST``, ``NVCC_FLAGS``.
"""

from setuptools import setup

from build_tools.build_ext import EXTENSIONS, BuildExt

setup(ext_modules=EXTENSIONS, cmdclass={"build_ext": BuildExt})
