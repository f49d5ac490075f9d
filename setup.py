"""Lists the packages: the repository root is `regraft`, the four folders are its subpackages."""

from setuptools import find_namespace_packages, setup

FOLDERS = ("rewriter", "passes", "runtime", "kernels")

# Namespace packages, because kernels/ has no __init__.py: a plain folder `kernels` on the path then
# loses to the third-party package of that name, whoever starts Python in the repository root.
found = find_namespace_packages(".", include=[p for f in FOLDERS for p in (f, f"{f}.*")])

setup(
    script_name="setup.py",  # tells the build to leave this file out of the package at its side
    package_dir={"regraft": "."},
    packages=["regraft", *(f"regraft.{name}" for name in sorted(found))],
    package_data={"": ["py.typed", "*.html"]},
)
