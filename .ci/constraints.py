"""Print the installed versions of what some extras of the package need, directly and indirectly, as constraints for pip.

python .ci/constraints.py cpu,md,test > constraints.txt
"""

import sys
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(package: str, extras: set[str]) -> dict[str, str]:
    """Name and version of each package that is needed, without those that another platform needs."""
    found: dict[str, str] = {}
    todo, seen = [(package, frozenset(extras))], set()
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue
        found[canonicalize_name(name)] = installed.version.split("+")[0]  # "+cu130" is a build, not a version
        for line in installed.requires or []:
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in wanted | {""}):
                todo.append((requirement.name, frozenset(requirement.extras)))
    del found[canonicalize_name(package)]
    return found


python = "{}.{}".format(*sys.version_info)
print(f"# Made by `make constraints`: versions with which the tests pass on Python {python}, which alone they bind.")
for name, version in sorted(closure("openmm-tensornet", set(sys.argv[1].split(","))).items()):
    print(f'{name}=={version}; python_version == "{python}"')
