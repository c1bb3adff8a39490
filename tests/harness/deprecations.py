"""Makes the deprecated calls of this project errors in its tests.

The filters in pyproject.toml match the module that a warning is attributed to.
That is the caller only if the library passes stacklevel=2 or more. Without it,
as in `optax.global_norm`, the warning is attributed to the library, just as a
warning about the library's own calls. The caller tells the two apart.
"""

import sys
import warnings

# FutureWarning is what some libraries use for deprecations that users see.
_KINDS = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
_PACKAGES = {
  "__main__",
  "benchmarks",
  "configs",
  "diffjax",
  "experiments",
  "recipes",
  "tests",
}


def make_errors(patch):
  """Raises deprecations of functions that this project calls directly.

  Args:
    patch: A `pytest.MonkeyPatch`, which undoes it.
  """
  original = warnings.warn

  def warn(message, category=None, stacklevel=1, source=None, **options):
    warning = message
    if not isinstance(message, Warning):
      warning = (category or UserWarning)(message)
    # Frame 1 is the library's function that warns, frame 2 its caller.
    caller = sys._getframe(2).f_globals.get("__name__", "")
    is_project_call = caller.partition(".")[0] in _PACKAGES
    if is_project_call and isinstance(warning, _KINDS):
      raise warning
    # This function adds a frame to the stack.
    original(message, category, stacklevel + 1, source, **options)

  patch.setattr(warnings, "warn", warn)
