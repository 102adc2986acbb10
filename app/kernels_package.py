"""Our package `kernels` has the name of a Hugging Face distribution that transformers probes for: is it still ours?"""

import importlib.util
from pathlib import Path

OURS = Path(__file__).parent.parent / "kernels"


def find_kernels_clash(found: Path | None = None) -> str | None:
    """One sentence if `import kernels` gets something else than ours, else None. Imports nothing.

    `found`: the package's folder, by default where Python would import it from.
    """
    if found is None:
        spec = importlib.util.find_spec("kernels")
        if spec is None or spec.origin is None:
            return f"the package `kernels` cannot be imported, expected it in {OURS}: install trunkline again"
        found = Path(spec.origin).parent
    if found.resolve() == OURS.resolve():
        return None
    return (
        f"`import kernels` finds {found}, expected {OURS}: another distribution of that name is installed beside "
        "trunkline; remove it with `pip uninstall kernels` and install trunkline again"
    )
