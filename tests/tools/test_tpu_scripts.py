"""The scripts for Cloud TPU, run against a fake gcloud.

The fake plays the states of slices and runs the commands for workers in
directories that stand for them: see tests/tools/fake/gcloud.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FAKE = pathlib.Path(__file__).with_name("fake")
SCRIPTS = ["create.sh", "setup.sh", "train.sh", "delete.sh"]
TRAIN = ["--config=configs/tiny.py", "--workdir=gs://bucket/run"]
# What shells could take apart or replace.
DIFFICULT = [
  "--config.data.source=text:/a  b/*.txt",
  """--config.train.sample_prompt=it's "quoted" $HOME `id` \\ λ""",
  "--config.name=two\nlines; exit 7 & {a,b} !x ~",
  "",
]


class Cloud:
  """A fake cloud with two workers and the repository that scripts run from."""

  def __init__(self, directory: pathlib.Path):
    self.directory = directory / "cloud"
    self.repository = directory / "repository"
    self.workers = [self.directory / "workers" / name for name in ("0", "1")]
    self.processes: list[subprocess.Popen] = []
    (self.directory / "calls").mkdir(parents=True)
    for worker in self.workers:
      worker.mkdir(parents=True)
    tools = self.repository / "tools/tpu"
    shutil.copytree(ROOT / "tools/tpu", tools)
    subprocess.run(["git", "init", "--quiet", self.repository], check=True)
    self.environment = os.environ | {
      "FAKE_CLOUD": str(self.directory),
      "PATH": f"{FAKE}:{os.environ['PATH']}",
      "TPU_NAME": "my-slice",
      "TPU_ZONE": "a-zone",
      "TPU_TYPE": "v5litepod-16",
      "TPU_POLL_SECONDS": "0.05",
    }

  def start(self, script: str, *arguments: str, **variables: str):
    """Starts a script and returns its process."""
    process = subprocess.Popen(
      ["bash", self.repository / "tools/tpu" / script, *arguments],
      env=self.environment | variables,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    self.processes.append(process)
    return process

  def run(self, script: str, *arguments: str, **variables: str):
    """Runs a script; returns its exit status and its output."""
    process = self.start(script, *arguments, **variables)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output

  def calls(self, *command: str) -> list[list[str]]:
    """Returns the arguments of gcloud's calls, optionally of one command."""
    start = len(["compute", "tpus"])
    end = start + len(command)
    matching = []
    for file in sorted((self.directory / "calls").iterdir()):
      arguments = file.read_text(encoding="utf-8").split("\0")[:-1]
      if arguments[start:end] == list(command):
        matching.append(arguments[end:])
    return matching

  def write(self, name: str, *lines: str) -> None:
    """Writes a file of the fake cloud: states, or a worker's property."""
    text = "".join(f"{line}\n" for line in lines)
    (self.directory / name).write_text(text, encoding="utf-8")

  def set_up(self) -> None:
    """Makes a slice that is ready, and runs setup.sh."""
    self.write("request", "ACTIVE")
    self.write("node", "READY")
    status, output = self.run("setup.sh")
    assert status == 0, output

  def finish(self, status: int) -> None:
    """Ends the training on all workers with an exit status."""
    for worker in self.workers:
      self.finish_worker(worker, status)

  def finish_worker(self, worker: pathlib.Path, status: int) -> None:
    (worker / "finish").write_text(f"{status}\n", encoding="utf-8")

  def wait_for(self, condition) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + 20
    while not condition():
      assert time.monotonic() < deadline
      time.sleep(0.02)

  def wait_for_run(self, worker: pathlib.Path, number: int = 1) -> None:
    """Waits until training has started `number` times on a worker."""
    self.wait_for(lambda: num_runs(worker) >= number)

  def has_ended(self) -> bool:
    status, output = self.run("train.sh", "--status")
    return status == 0 and ": running: " not in output


def trained_with(worker: pathlib.Path) -> list[str]:
  """The arguments that training got on a worker."""
  return (worker / "arguments").read_text(encoding="utf-8").split("\0")[1:-1]


def num_runs(worker: pathlib.Path) -> int:
  if not (worker / "runs").exists():
    return 0
  return len((worker / "runs").read_text(encoding="utf-8").splitlines())


@pytest.fixture
def cloud(tmp_path):
  cloud = Cloud(tmp_path)
  yield cloud
  cloud.finish(0)
  for process in cloud.processes:
    process.kill()
    process.communicate()


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_the_variables(cloud, script):
  status, output = cloud.run(script, "--help", TPU_NAME="", TPU_ZONE="")
  assert status == 0
  assert f"Usage: tools/tpu/{script}" in output and "TPU_ZONE" in output
  assert cloud.calls() == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_missing_variable_is_named(cloud, script):
  status, output = cloud.run(script, TPU_ZONE="")
  assert status == 1 and "TPU_ZONE is not set; run 'export" in output
  assert cloud.calls() == []


@pytest.mark.parametrize("script", ["create.sh", "setup.sh", "delete.sh"])
def test_an_unknown_argument_is_refused(cloud, script):
  status, output = cloud.run(script, "--spot")
  assert status == 1 and "does not take '--spot'" in output
  assert cloud.calls() == []


@pytest.mark.parametrize(
  "kind, image",
  [
    ("v4-16", "tpu-ubuntu2204-base"),
    ("v5litepod-16", "v2-alpha-tpuv5-lite"),
    ("v5p-8", "v2-alpha-tpuv5"),
    ("v6e-8", "v2-alpha-tpuv6e"),
  ],
)
def test_create_requests_a_slice_and_waits(cloud, kind, image):
  cloud.write("create.1", "ACCEPTED", "PROVISIONING", "ERROR", "ACTIVE")
  status, output = cloud.run("create.sh", TPU_TYPE=kind)
  assert status == 0, output
  assert cloud.calls("queued-resources", "create") == [
    [
      "my-slice",
      "--node-id=my-slice",
      f"--accelerator-type={kind}",
      f"--runtime-version={image}",
      "--zone=a-zone",
    ]
  ]
  assert "is ACCEPTED" in output and "is PROVISIONING" in output
  assert "my-slice is ready; next: tools/tpu/setup.sh" in output


def test_create_passes_the_options(cloud):
  cloud.write("create.1", "ACTIVE")
  status, _ = cloud.run(
    "create.sh",
    TPU_TYPE="v9-8",
    TPU_RUNTIME_VERSION="image",
    TPU_SPOT="1",
    TPU_PROJECT="a project",
  )
  assert status == 0
  (call,) = cloud.calls("queued-resources", "create")
  assert "--runtime-version=image" in call and "--spot" in call
  for call in cloud.calls():
    assert "--project=a project" in call and "--zone=a-zone" in call


def test_create_does_not_guess_the_image_of_an_unknown_generation(cloud):
  status, output = cloud.run("create.sh", TPU_TYPE="tpu7x-8")
  assert status == 1 and "set TPU_RUNTIME_VERSION as well" in output
  assert cloud.calls("queued-resources", "create") == []


def test_create_says_that_a_zone_has_no_capacity_and_keeps_waiting(cloud):
  waiting = ["WAITING_FOR_RESOURCES"] * 4
  cloud.write("create.1", *waiting, "PROVISIONING", "ACTIVE")
  status, output = cloud.run("create.sh")
  assert status == 0, output
  assert output.count("No capacity for v5litepod-16 in a-zone") == 1
  assert "TPU_ZONE=ANOTHER-ZONE tools/tpu/create.sh" in output
  assert "my-slice is ready" in output


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDED"])
def test_create_reports_a_request_that_ends(cloud, state):
  cloud.write("create.1", "ACCEPTED", state)
  status, output = cloud.run("create.sh")
  assert status == 1
  assert "the reason that the service gives" in output
  assert f"my-slice is {state} in a-zone" in output
  assert len(cloud.calls("queued-resources", "create")) == 1


@pytest.mark.parametrize(
  "request_state, node_state",
  [("SUSPENDED", "READY"), ("FAILED", "READY"), ("ACTIVE", "PREEMPTED")],
)
def test_create_replaces_what_is_left(cloud, request_state, node_state):
  cloud.write("request", request_state)
  cloud.write("node", node_state)
  cloud.write("create.1", "ACTIVE")
  status, output = cloud.run("create.sh")
  assert status == 0, output
  assert cloud.calls("queued-resources", "delete") == [
    ["my-slice", "--force", "--quiet", "--zone=a-zone"]
  ]
  assert len(cloud.calls("queued-resources", "create")) == 1


def test_create_waits_for_a_request_that_exists(cloud):
  cloud.write("request", "WAITING_FOR_RESOURCES", "ACTIVE")
  cloud.write("node", "CREATING", "READY")
  status, output = cloud.run("create.sh")
  assert status == 0, output
  assert cloud.calls("queued-resources", "create") == []


def test_create_continues_if_the_first_question_fails(cloud):
  cloud.write("create.1", "ERROR", "ACTIVE")
  status, output = cloud.run("create.sh")
  assert status == 0, output
  assert len(cloud.calls("queued-resources", "create")) == 1


def test_create_ends_if_gcloud_keeps_failing(cloud):
  cloud.write("request", "ERROR")
  status, output = cloud.run("create.sh")
  assert status == 1 and "the network is unreachable" in output
  assert "gcloud failed 5 times in a row" in output


def test_setup_copies_the_working_tree_to_all_workers(cloud):
  repository = cloud.repository
  (repository / ".gitignore").write_text("ignored\n")
  (repository / "ignored").write_text("")
  (repository / "a new file").write_text("")
  (repository / "deleted").write_text("")
  subprocess.run(["git", "-C", repository, "add", "deleted"], check=True)
  (repository / "deleted").unlink()
  for worker in cloud.workers:
    source = worker / "diffjax/source"
    source.mkdir(parents=True)
    (source / "from an earlier setup").write_text("")
  cloud.set_up()
  for worker in cloud.workers:
    source = worker / "diffjax/source"
    names = {path.name for path in source.iterdir()}
    assert names == {".gitignore", "a new file", "tools"}
    uv_calls = (worker / "uv_calls").read_text(encoding="utf-8").splitlines()
    assert "--python=3.12" in uv_calls[0].split()
    assert uv_calls[1].endswith(f"--editable {source}[tpu,gcs]")


def test_setup_reports_a_worker_that_gets_no_copy(cloud):
  cloud.write("request", "ACTIVE")
  cloud.write("workers/1.broken")
  status, output = cloud.run("setup.sh")
  assert status == 1 and "No space left on device" in output
  assert "the copy failed on at least one worker" in output
  assert cloud.calls("tpu-vm", "ssh") == []


def test_setup_reports_a_worker_that_cannot_install(cloud):
  cloud.write("request", "ACTIVE")
  cloud.write("workers/1/uv_error", "No solution found")
  status, output = cloud.run("setup.sh")
  assert status == 1 and "No solution found" in output
  assert "the installation failed on at least one worker" in output
  assert "next: tools/tpu/train.sh" not in output


def test_train_runs_detached_on_all_workers(cloud):
  """All arguments arrive, and the run outlives the session of ssh."""
  cloud.set_up()
  status, output = cloud.run("train.sh", *TRAIN, *DIFFICULT)
  assert status == 0, output
  for worker in cloud.workers:
    cloud.wait_for_run(worker)
    assert trained_with(worker) == ["-m", "diffjax.train", *TRAIN, *DIFFICULT]
  _, output = cloud.run("train.sh", "--status")
  assert output.count(": running: diffjax.train --config=configs/tiny.py") == 2
  cloud.finish(0)
  cloud.wait_for(cloud.has_ended)
  _, output = cloud.run("train.sh", "--status")
  assert output.count(": ended with status 0: diffjax.train") == 2


def test_the_log_can_be_followed_to_the_end_of_the_run(cloud):
  cloud.set_up()
  assert cloud.run("train.sh", *TRAIN)[0] == 0
  following = cloud.start("train.sh", "--follow=1")
  lines = []
  while "step 1\n" not in lines:
    lines.append(following.stdout.readline())
    assert lines[-1], lines
  cloud.finish(3)
  following.communicate(timeout=20)
  cloud.wait_for(cloud.has_ended)
  assert "starts diffjax.train --config=configs/tiny.py" in lines[0]
  _, output = cloud.run("train.sh", "--follow")
  assert "step 1" in output and "ended with status 3" in output
  workers = []
  for call in cloud.calls("tpu-vm", "ssh"):
    if call[2].endswith(" follow"):
      workers.append(call[1])
  assert workers == ["--worker=1", "--worker=0"]


@pytest.mark.parametrize(
  "flags, message",
  [
    (["--workdir=gs://bucket/run"], "pass --config=CONFIG"),
    (["--config=tiny"], "pass --workdir=gs://BUCKET/DIR"),
    (["--config=tiny", "--workdir=runs/tiny"], "all workers must see"),
  ],
)
def test_train_requires_a_config_and_a_workdir_in_a_bucket(
  cloud, flags, message
):
  status, output = cloud.run("train.sh", *flags)
  assert status == 1 and message in output
  assert cloud.calls() == []


@pytest.mark.parametrize("options", [[], ["--keep_alive"]])
def test_a_second_run_is_refused(cloud, options):
  cloud.set_up()
  assert cloud.run("train.sh", *TRAIN)[0] == 0
  status, output = cloud.run("train.sh", *options, *TRAIN, "--seed=1")
  assert status == 1 and "run is in progress" in output
  assert "diffjax.train --config=configs/tiny.py" in output
  assert [num_runs(worker) for worker in cloud.workers] == [1, 1]
  status, output = cloud.run("setup.sh")
  assert status == 1 and "stop it first" in output


def test_keep_alive_refuses_a_run_whose_flags_extend_its_own(cloud):
  cloud.set_up()
  assert cloud.run("train.sh", *TRAIN, "--seed=1")[0] == 0
  status, output = cloud.run("train.sh", "--keep_alive", *TRAIN)
  assert status == 1 and "run is in progress" in output
  assert [num_runs(worker) for worker in cloud.workers] == [1, 1]


def test_a_worker_that_cannot_start_stops_the_others(cloud):
  cloud.set_up()
  (cloud.workers[1] / "diffjax/venv/bin/python").unlink()
  status, output = cloud.run("train.sh", *TRAIN)
  assert status == 1 and "diffjax is not installed" in output
  assert "stops the others" in output
  assert cloud.has_ended()


def test_train_says_that_a_slice_is_not_set_up(cloud):
  cloud.write("request", "ACTIVE")
  status, output = cloud.run("train.sh", *TRAIN)
  assert status == 1 and "tools/tpu/create.sh && tools/tpu/setup.sh" in output


def test_stop_lets_the_run_save(cloud):
  cloud.set_up()
  assert cloud.run("train.sh", *TRAIN)[0] == 0
  status, output = cloud.run("train.sh", "--stop")
  assert status == 0 and output.count(": stopped: ") == 2
  for worker in cloud.workers:
    log = (worker / "diffjax/run/log").read_text(encoding="utf-8")
    assert "saved a checkpoint" in log
  status, _ = cloud.run("train.sh", *TRAIN)
  assert status == 0, "the same command starts it again"


def test_keep_alive_makes_a_slice_and_ends_with_the_run(cloud):
  cloud.write("create.1", "ACTIVE")
  watching = cloud.start("train.sh", "--keep_alive", *TRAIN)
  cloud.wait_for_run(cloud.workers[1])
  cloud.finish(0)
  output, _ = watching.communicate(timeout=20)
  assert watching.returncode == 0 and "the run is complete" in output


def test_keep_alive_resumes_a_preempted_run(cloud):
  """A slice of the same kind gets the same training command."""
  cloud.write("create.1", "ACTIVE")
  cloud.write("create.2", "WAITING_FOR_RESOURCES", "ACTIVE")
  watching = cloud.start(
    "train.sh", "--keep_alive", *TRAIN, *DIFFICULT, TPU_SPOT="1"
  )
  cloud.wait_for_run(cloud.workers[1])
  first_arguments = trained_with(cloud.workers[1])
  cloud.write("node", "PREEMPTED")
  cloud.wait_for_run(cloud.workers[1], number=2)
  assert trained_with(cloud.workers[1]) == first_arguments
  cloud.finish(0)
  output, _ = watching.communicate(timeout=20)
  assert watching.returncode == 0, output
  assert "the slice is PREEMPTED" in output
  creations = cloud.calls("queued-resources", "create")
  assert len(creations) == 2 and creations[0] == creations[1]
  assert "--spot" in creations[1]
  assert len(cloud.calls("queued-resources", "delete")) == 1


def test_keep_alive_restarts_after_the_loss_of_one_worker(cloud):
  cloud.set_up()
  watching = cloud.start("train.sh", "--keep_alive", *TRAIN)
  cloud.wait_for_run(cloud.workers[0])
  cloud.wait_for_run(cloud.workers[1])
  cloud.finish_worker(cloud.workers[1], 1)
  cloud.wait_for_run(cloud.workers[1], number=2)
  cloud.finish(0)
  output, _ = watching.communicate(timeout=20)
  assert watching.returncode == 0, output
  assert "the run is failed, failure 1 of 5 in a row" in output
  assert "worker-1: ended with status 1: " in output
  assert num_runs(cloud.workers[0]) > 1, "the other worker starts again as well"


def test_keep_alive_gives_up_on_a_run_that_keeps_failing(cloud):
  cloud.set_up()
  cloud.finish(1)
  status, output = cloud.run("train.sh", "--keep_alive", *TRAIN)
  assert status == 1 and "gives up; the log: " in output
  assert num_runs(cloud.workers[0]) == 5


def test_an_interrupted_run_is_not_complete(cloud):
  """A machine that shuts down signals the run, which then ends with 0."""
  cloud.set_up()
  assert cloud.run("train.sh", *TRAIN)[0] == 0
  pid_file = cloud.workers[0] / "diffjax/run/pid"
  cloud.wait_for(lambda: pid_file.exists() and pid_file.read_text().strip())
  training = int(pid_file.read_text())
  os.killpg(os.getpgid(training), signal.SIGTERM)
  cloud.finish_worker(cloud.workers[1], 0)
  cloud.wait_for(cloud.has_ended)
  _, output = cloud.run("train.sh", "--status")
  assert "worker-0: interrupted: " in output
  assert "worker-1: ended with status 0: " in output


def test_keep_alive_ends_if_the_run_is_stopped(cloud):
  cloud.set_up()
  watching = cloud.start("train.sh", "--keep_alive", *TRAIN)
  cloud.wait_for_run(cloud.workers[1])
  assert cloud.run("train.sh", "--stop")[0] == 0
  output, _ = watching.communicate(timeout=20)
  assert watching.returncode == 0 and "the run is stopped" in output


def test_delete_says_what_it_deletes(cloud):
  cloud.write("request", "ACTIVE")
  status, output = cloud.run("delete.sh", "--quiet")
  assert status == 0, output
  assert "the queued resource my-slice, which is ACTIVE" in output
  assert "its node my-slice" in output
  assert cloud.calls("queued-resources", "delete") == [
    ["my-slice", "--force", "--quiet", "--zone=a-zone"]
  ]


def test_delete_asks_first(cloud):
  cloud.write("request", "ACTIVE")
  status, output = cloud.run("delete.sh")
  assert status == 1 and "nothing was deleted" in output
  assert cloud.calls("queued-resources", "delete") == []


def test_delete_without_a_slice(cloud):
  status, output = cloud.run("delete.sh", "--quiet")
  assert status == 0 and "there is no queued resource my-slice" in output
  assert cloud.calls("queued-resources", "delete") == []


def test_shellcheck():
  """The scripts have no mistake that shellcheck knows."""
  shellcheck = pathlib.Path(sys.executable).with_name("shellcheck")
  scripts = [ROOT / ".ci/run", *(ROOT / "tools").rglob("*.sh"), *FAKE.iterdir()]
  result = subprocess.run(
    [shellcheck, "--external-sources", *scripts],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert result.returncode == 0, result.stdout
