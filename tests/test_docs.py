"""What the README and docs/ say is so: links, commands, fields, files, code and tables."""

import dataclasses
import functools
import importlib
import importlib.util
import json
import pathlib
import re
import shlex

import pytest
from absl import flags
from ml_collections import config_flags

from benchmarks import topologies
from diffjax.cli import command
from diffjax.config import (
  Config,
  UserError,
  from_config_dict,
)
from diffjax.evals import SUITES
from diffjax.evals.suite import suite_class
from diffjax.model.attention import ATTENTION
from diffjax.model.flops import parameter_count, step_flops
from diffjax.ops.diff_attention import implementations
from experiments import plots, results
from tests.harness import ROOT, own_variants
from tests.harness.pages import (
  DOCUMENTATION,
  commands,
  in_backticks,
  outside_code,
  python_blocks,
)
from tests.harness.variants import EXPECTED

PAGES = [*DOCUMENTATION, ROOT / "CONTRIBUTING.md"]
PAGES += [
  page
  for folder in ("experiments", "benchmarks")
  for page in sorted((ROOT / folder).rglob("*.md"))
]
PAGES.remove(
  ROOT / "benchmarks/faults.md"
)  # the last results, which name files as they were then
OURS = ("diffjax", "benchmarks", "experiments", "recipes")
FOLDERS = (
  "benchmarks|configs|diffjax|docs|experiments|notebooks|recipes|tests|tools"
)
SECTIONS = Config().to_dict()
# Commands that pass other flags on, and to whom.
PASSED_ON = {"benchmarks.gpu_day": ["benchmarks.gpu"]}
BY_PAGE = pytest.mark.parametrize(
  "page", PAGES, ids=lambda page: str(page.relative_to(ROOT))
)


def settings():
  """The settings of all suites, as `diffjax.evaluate` reads them."""
  return {name: suite_class(name)() for name in SUITES}


@functools.cache
def anchors(page):
  """The names that GitHub gives to a page's headings."""
  found = []
  for heading in re.findall(
    r"^#+ (.*)$",
    re.sub(
      r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
    ),
    re.MULTILINE,
  ):
    name = re.sub(
      r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
    ).replace(" ", "-")
    found.append(name if name not in found else f"{name}-{found.count(name)}")
  return found


def wrong_links(text, page):
  """Links to files that are not there, and to headings that a page does not have."""
  outside = re.sub(r"`[^`\n]*`", "", outside_code(text))
  targets = re.findall(r"\]\(([^)\s]+)\)", outside) + re.findall(
    r"(?:src|href)=\"([^\"]+)\"", outside
  )
  for target in targets:
    path, _, anchor = target.partition("#")
    if re.match(r"[a-z]+:", target):
      continue
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
      yield f"{target}: no such file"
    elif anchor and anchor not in anchors(file):
      yield f"{target}: no such heading; there are {anchors(file)}"


@functools.cache
def flags_of(module):
  """The names of a command's flags, read from its file; and those of the command line that our commands share."""
  spec = importlib.util.find_spec(module)
  file = (
    pathlib.Path(spec.submodule_search_locations[0], "__main__.py")
    if spec.submodule_search_locations
    else pathlib.Path(spec.origin)
  )
  source = file.read_text()
  if "command.run(" in source:
    source += (
      (ROOT / "diffjax/cli/command.py")
      .read_text()
      .replace('"config"' if "with_config=False" in source else '"set"', "")
    )
  own = re.findall(r'(?:DEFINE_\w+\(\s*"|"--)(\w+)"', source)
  return {
    "help",
    *own,
    *(name for other in PASSED_ON.get(module, ()) for name in flags_of(other)),
  }


def wrong_values(module, arguments):
  """What a command refuses in its config or its settings, read as commands read them; None if nothing."""
  values = flags.FlagValues()
  own = [module]
  for argument in arguments:
    if re.match(r"--(config|set)\b", argument):
      # A config of the package may be given by its name alone.
      named = r"^--config=(\w+)(?=:|$)"
      own.append(re.sub(named, r"--config=configs/\1.py", argument))
  try:
    if any(argument.startswith("--config=") for argument in own):
      holder = config_flags.DEFINE_config_file(
        "config", flag_values=values, sys_argv=own
      )
      values["config"].parser = command.ConfigFile()
      values(own)
      from_config_dict(holder.value)
    elif module == "diffjax.evaluate":
      holder = config_flags.DEFINE_config_dict(
        "set",
        command.settings_to_config_dict(settings()),
        flag_values=values,
        sys_argv=own,
      )
      values(own)
      sections = {name: type(suite) for name, suite in settings().items()}
      command.settings_from_config_dict(holder.value, sections)
  except (
    flags.Error,
    AttributeError,
    KeyError,
    OSError,
    TypeError,
    ValueError,
    UserError,
  ) as error:
    return error


def wrong_commands(text, page):
  """Commands of modules, with flags, config files, fields, settings and suites that are not there."""
  for module, arguments in commands(text):
    name = shlex.join([module, *arguments])
    try:
      found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
      found = None
    if found is None:
      yield f"{name}: no such module"
    elif module.partition(".")[0] in OURS:
      given = {
        argument.lstrip("-").partition("=")[0].partition(".")[0]
        for argument in arguments
        if argument.startswith("--")
      }
      if unknown := given - flags_of(module):
        yield f"{name}: no such flag: {', '.join(unknown)}"
      elif (error := wrong_values(module, arguments)) is not None:
        yield f"{name}: {error}"
      suites = [
        suite
        for argument in arguments
        if argument.startswith("--suite=")
        for suite in argument.partition("=")[2].split(",")
      ]
      if module == "diffjax.evaluate" and (
        unknown := set(suites) - set(SUITES)
      ):
        yield f"{name}: no such suite: {', '.join(unknown)}"


def wrong_fields(text, page):
  """Fields of configs and settings in backticks, such as `train.steps` and `--set.needle.lengths=…`, that are not there."""
  for code in in_backticks(text):
    if field := re.fullmatch(
      rf"(?:--)?(?:config\.)?({'|'.join(SECTIONS)})\.(\w+)(?:=.*)?", code
    ):
      if field[2] != "py" and field[2] not in SECTIONS[field[1]]:
        yield f"{code}: no such field"
    elif setting := re.match(r"--set\.(\w+)\.(\w+)", code):
      if not hasattr(settings().get(setting[1]), setting[2]):
        yield f"{code}: no such setting"


def wrong_files(text, page):
  """Files and folders of the repository in backticks that are not there."""
  for code in in_backticks(text):
    if (
      re.fullmatch(rf"(?:{FOLDERS})/[\w./-]*", code)
      and not (ROOT / code).exists()
    ):
      yield f"{code}: no such file"


@BY_PAGE
def test_links_commands_fields_and_files_are_there(page, monkeypatch, tmp_path):
  monkeypatch.chdir(ROOT)
  text = page.read_text()
  found = []
  # Pages have commands with the variants and suites that they define.
  with own_variants.registered(tmp_path):
    for check in (wrong_links, wrong_commands, wrong_fields, wrong_files):
      found += check(text, page)
  assert found == []


@pytest.mark.parametrize(
  "check, text, complaint",
  [
    (wrong_links, "[a](nothing.md)", "nothing.md: no such file"),
    (wrong_links, "[two\nlines](data.md#c5)", "data.md#c5: no such heading"),
    (wrong_links, "![a picture](images/nothing.png)", "no such file"),
    (
      wrong_commands,
      "    python -m diffjax.trian --config=configs/tiny.py",
      "diffjax.trian --config=configs/tiny.py: no such module",
    ),
    (
      wrong_commands,
      "`python -m diffjax.train --workdirs=x`",
      "no such flag: workdirs",
    ),
    (
      wrong_commands,
      "srun -n 2 python -m diffjax.train --config=configs/nope.py --workdir=x",
      "nope.py",
    ),
    (
      wrong_commands,
      "diffjax train --config=tiny:v3 --workdir=x",
      "'v3' is not allowed",
    ),
    (
      wrong_commands,
      'on 0 ".venv/bin/python -m diffjax.train --config=configs/tiny.py --config.train.step=3"',
      "train.step",
    ),
    (
      wrong_commands,
      "python -m diffjax.train --config=configs/tiny.py \\\n  --config.train.steps=many",
      "many",
    ),
    (
      wrong_commands,
      "python -m diffjax.train --config=configs/tiny.py --config.data.length=0",
      "data.length = 0",
    ),
    (
      wrong_commands,
      "python -m diffjax.generate --workdir=x --config=configs/tiny.py",
      "no such flag: config",
    ),
    (wrong_commands, "`diffjax train --config=nope`", "nope.py"),
    (
      wrong_commands,
      "`diffjax trian --config=tiny`",
      "diffjax.trian --config=tiny: no such module",
    ),
    (
      wrong_commands,
      "`diffjax train --config=tiny:transformer --config.train.step=3`",
      "train.step",
    ),
    (
      wrong_commands,
      "python -m diffjax.evaluate --suite=validation,needles --workdir=x",
      "no such suite: needles",
    ),
    (
      wrong_commands,
      "python -m diffjax.evaluate --suite=needle --workdir=x --set.needle.length=3",
      "length",
    ),
    (
      wrong_commands,
      "python -m benchmarks.gpu --statics",
      "no such flag: statics",
    ),
    (
      wrong_commands,
      "`a` and `python -m diffjax.generate\n--workdirs=x` and\n`b`",
      "no such flag: workdirs",
    ),
    (
      wrong_fields,
      "set `train.step` or `--config.train.steps=3`",
      "train.step: no such field",
    ),
    (wrong_fields, "`--set.needle.length=3`", "no such setting"),
    (
      wrong_files,
      "see `diffjax/trian.py` and `diffjax/train.py`",
      "diffjax/trian.py: no such file",
    ),
  ],
)
def test_what_is_wrong_is_seen(check, text, complaint, monkeypatch):
  monkeypatch.chdir(ROOT)
  (found,) = check(text, ROOT / "docs/README.md")
  assert complaint in found


def test_a_command_ends_where_the_shell_ends_it():
  text = """    python -m a.b --c='d e' --f=\\$HOME/g   # no
  for i in 0 1; do python -m a --i=$i & done; wait
  on all ".venv/bin/python -m b --c" and `python -m c --d`, bash -c 'python -m d --slice=$A/$B'
  diffjax trains models; run `diffjax train --config=tiny` or diffjax --help"""
  assert commands(text) == [
    ("a.b", ["--c=d e", "--f=$HOME/g"]),
    ("a", ["--i=$i"]),
    ("b", ["--c"]),
    ("c", ["--d"]),
    ("d", ["--slice=$A/$B"]),
    ("diffjax.train", ["--config=tiny"]),
  ]
  text = "`diffjax train --config=tiny` or .venv/bin/diffjax generate --a=b"
  assert commands(text) == [
    ("diffjax.train", ["--config=tiny"]),
    ("diffjax.generate", ["--a=b"]),
  ]


@pytest.mark.parametrize(
  "page",
  [page for page in DOCUMENTATION if python_blocks(page.read_text())],
  ids=lambda page: page.name,
)
def test_code_runs_as_it_stands_there(page):
  """One block after another, in one program. Those on a trained run are run by tests/test_commands.py."""
  names = {"__name__": "user"}
  with own_variants.restore_registry():
    for block in python_blocks(page.read_text()):
      if "runs/" not in block:
        exec(compile(block, str(page), "exec", dont_inherit=True), names)


def test_the_index_names_every_page():
  index = (ROOT / "docs/README.md").read_text()
  assert [
    page.name
    for page in DOCUMENTATION
    if page.name != "README.md" and f"({page.name})" not in index
  ] == []


def table(page, heading):
  """The rows below a table's heading, as lists of cells."""
  rows = (ROOT / page).read_text().partition(f"\n{heading}\n")[2].splitlines()
  rows = rows[1 : next(index for index, row in enumerate(rows) if not row)]
  return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_table_of_configs():
  for name, parameters, embed_dim, layers, heads, ffn_dim, tokens, _ in table(
    "docs/training.md",
    "| config | parameters | E | L | DIFF heads × d | F | tokens a step | for |",
  ):
    config = from_config_dict(
      importlib.import_module(f"diffjax.configs.{name.strip('`')}").get_config()
    )
    model, step = config.model, config.train.batch_size * config.data.length
    assert (embed_dim, layers, ffn_dim) == (
      str(model.embed_dim),
      str(model.num_layers),
      str(model.ffn_dim),
    ), name
    assert heads == f"{model.num_heads} × {model.head_dim}", name
    unit = {"K": 1e3, "M": 1e6, "B": 1e9}
    for written, number in (
      (parameters, parameter_count(model)),
      (tokens, step),
    ):
      value, suffix = written.split()
      digits = len(value.partition(".")[2])
      assert float(value) == pytest.approx(
        number / unit[suffix], abs=0.51 * 10**-digits
      ), f"{name}: {written}, but {number}"


def test_the_table_of_variants():
  """Parameters and FLOPs at the widths of diff_3b, each over those of a Transformer with keys and values of the same size."""
  diff = from_config_dict(
    importlib.import_module("diffjax.configs.diff_3b").get_config()
  ).model
  rows = table(
    "docs/family.md",
    "| `model.attention` | output of a head | parameters | FLOPs | from |",
  )
  names = {name.partition(",")[0] for name, *_ in rows}
  assert set(EXPECTED) <= names <= set(ATTENTION)
  for name, _, *written, _ in rows:
    kind, _, shared = name.partition(", ")
    wide = ATTENTION[
      kind
    ].value_dim_factor  # a Transformer's heads to one of the variant's
    heads = 2 * diff.num_heads // wide
    noise = heads // 4 if shared else None
    model = dataclasses.replace(
      diff,
      attention=kind,
      num_heads=heads,
      num_noise_heads=noise,
      num_kv_heads=noise or heads,
      head_norm=diff.head_norm and wide == 2,
    )
    plain = dataclasses.replace(
      diff,
      attention="softmax",
      num_heads=2 * diff.num_heads,
      num_kv_heads=model.num_kv_heads * wide,
      head_norm=False,
    )
    flops = lambda model: step_flops(model, 4096, 4096).forward
    found = [
      parameter_count(model) / parameter_count(plain),
      flops(model) / flops(plain),
    ]
    assert [float(cell) for cell in written] == [
      pytest.approx(value, abs=5.1e-4) for value in found
    ], name


def test_tables_name_everything():
  assert {
    suite.strip("`")
    for suite, _ in table("docs/evaluation.md", "| suite | measures |")
  } == set(SUITES)
  named = table(
    "docs/attention.md", "| `implementation` | what it is | `auto` takes it |"
  )
  assert {name.strip("`") for name, *_ in named} == set(
    implementations.REGISTRY.built_in
  )


def test_the_measured_slices():
  assert (
    topologies.table(topologies.Compiled(offline=True))[0]
    in (ROOT / "docs/slices.md").read_text()
  )


def test_the_table_of_ablations_is_of_the_committed_runs():
  """The table has the means and Welch's intervals of results.json."""
  committed = json.loads(
    (ROOT / "experiments/ablations/results.json").read_text(encoding="utf-8")
  )
  heading = (
    "| 0.84 M parameters, 2.5 M bytes | loss | − Transformer's"
    " | AR-Hit | − Transformer's | Others | − Transformer's |"
  )
  rows = table("experiments/ablations/README.md", heading)
  variants = {}  # by the name that figures give a row
  for run in committed["runs"]:
    variants[plots.style(run["variant"]).name] = run["variant"]
  names = [name for name, *_ in rows]
  assert sorted(names) == sorted(variants)
  for name, *written in rows:
    variant = variants[name]
    expected = []
    for metric in ("loss", "ar_hit", "others"):
      key = f"validation/{metric}"
      values = results.values(committed, variant, key).values()
      mean, _, _ = results.mean_interval([*values])
      expected.append(f"{mean:.3f}")
      if variant == "transformer":
        expected.append("")
        continue
      difference, low, high = results.difference(committed, variant, key)
      interval = f"{difference:.3f} [{low:.3f}, {high:.3f}]"
      expected.append(interval.replace("-", "−"))
    # Bold marks a significance test, which is not checked here.
    plain = [cell.strip("*") for cell in written]
    assert plain == expected, name
