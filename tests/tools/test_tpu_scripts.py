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
from collections.abc import Callable, Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FAKE = pathlib.Path(__file__).with_name("fake")
SCRIPTS = ["create.sh", "setup.sh", "train.sh", "delete.sh"]
TRAIN = ["--config=configs/tiny.py", "--workdir=gs://bucket/run"]
# Arguments that a shell could split or expand.
DIFFICULT = [
  "--config.data.source=text:/a  b/*.txt",
  """--config.train.sample_prompt=it's "quoted" $HOME `id` \\ λ""",
  "--config.name=two\nlines; exit 7 & {a,b} !x ~",
  "",
]


class Cloud:
  """A fake cloud with two workers and the repository that scripts run from."""

  def __init__(self, directory: pathlib.Path):
    """Uses the cloud in a directory, which `make_cloud` has created."""
    self.directory = directory / "cloud"
    self.repository = directory / "repository"
    workers = self.directory / "workers"
    self.workers = [workers / "0", workers / "1"]
    self.processes: list[subprocess.Popen] = []
    self.environment = os.environ | {
      "FAKE_CLOUD": str(self.directory),
      "PATH": f"{FAKE}:{os.environ['PATH']}",
      "TPU_NAME": "my-slice",
      "TPU_ZONE": "a-zone",
      "TPU_TYPE": "v5litepod-16",
      "TPU_POLL_SECONDS": "0.05",
    }

  def start(
    self, script: str, *arguments: str, **variables: str
  ) -> subprocess.Popen:
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

  def run(
    self, script: str, *arguments: str, **variables: str
  ) -> tuple[int, str]:
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

  def followed_workers(self) -> list[str]:
    """Returns the workers whose log was followed, as flags of gcloud."""
    workers = []
    for call in self.calls("tpu-vm", "ssh"):
      worker, command = call[1:3]
      if command.endswith(" follow"):
        workers.append(worker)
    return workers

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

  def train(self, *arguments: str) -> None:
    """Runs train.sh, which must succeed."""
    status, output = self.run("train.sh", *TRAIN, *arguments)
    assert status == 0, output

  def finish(self, *, exit_status: int) -> None:
    """Ends the training on all workers."""
    for worker in self.workers:
      self.finish_worker(worker, exit_status=exit_status)

  def finish_worker(self, worker: pathlib.Path, *, exit_status: int) -> None:
    """Ends the training on a worker."""
    (worker / "finish").write_text(f"{exit_status}\n", encoding="utf-8")

  def wait_for(self, condition: Callable[[], bool]) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + 20
    while not condition():
      assert time.monotonic() < deadline
      time.sleep(0.02)

  def wait_for_run(self, worker: pathlib.Path, number: int = 1) -> None:
    """Waits until training has started `number` times on a worker."""
    self.wait_for(lambda: num_runs(worker) >= number)

  def has_ended(self) -> bool:
    """Returns whether training runs on no worker."""
    status, output = self.run("train.sh", "--status")
    return status == 0 and ": running: " not in output


def make_cloud(directory: pathlib.Path) -> Cloud:
  """Creates a cloud without a slice."""
  cloud = Cloud(directory)
  (cloud.directory / "calls").mkdir(parents=True)
  for worker in cloud.workers:
    worker.mkdir(parents=True)
  shutil.copytree(ROOT / "tools/tpu", cloud.repository / "tools/tpu")
  subprocess.run(["git", "init", "--quiet", cloud.repository], check=True)
  return cloud


def training_arguments(worker: pathlib.Path) -> list[str]:
  """Returns the arguments that Python got on a worker."""
  text = (worker / "arguments").read_text(encoding="utf-8")
  # The first entry is the working directory.
  return text.split("\0")[1:-1]


def num_runs(worker: pathlib.Path) -> int:
  """Returns how often training has started on a worker."""
  if not (worker / "runs").exists():
    return 0
  return len((worker / "runs").read_text(encoding="utf-8").splitlines())


def end_processes(cloud: Cloud) -> None:
  """Ends the training and the scripts of a cloud."""
  cloud.finish(exit_status=0)
  for process in cloud.processes:
    process.kill()
    process.communicate()


@pytest.fixture
def cloud(tmp_path) -> Iterator[Cloud]:
  """A cloud without a slice."""
  cloud = make_cloud(tmp_path)
  yield cloud
  end_processes(cloud)


@pytest.fixture(scope="module")
def set_up_directory(tmp_path_factory) -> pathlib.Path:
  """A cloud with a slice on which setup.sh has run. It must not be changed."""
  directory = tmp_path_factory.mktemp("set_up")
  make_cloud(directory).set_up()
  return directory


@pytest.fixture
def ready_cloud(set_up_directory, tmp_path) -> Iterator[Cloud]:
  """A cloud with a slice on which setup.sh has run."""
  shutil.copytree(set_up_directory, tmp_path, dirs_exist_ok=True)
  cloud = Cloud(tmp_path)
  yield cloud
  end_processes(cloud)


@pytest.fixture(scope="module")
def running_cloud(set_up_directory, tmp_path_factory) -> Iterator[Cloud]:
  """A cloud on which a run is in progress. No test may end it."""
  directory = tmp_path_factory.mktemp("running")
  shutil.copytree(set_up_directory, directory, dirs_exist_ok=True)
  cloud = Cloud(directory)
  cloud.train(*DIFFICULT)
  for worker in cloud.workers:
    cloud.wait_for_run(worker)
  yield cloud
  end_processes(cloud)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_the_variables(cloud, script):
  """Help is available before the variables are set."""
  status, output = cloud.run(script, "--help", TPU_NAME="", TPU_ZONE="")

  assert status == 0
  assert f"Usage: tools/tpu/{script}" in output
  assert "TPU_ZONE" in output
  assert cloud.calls() == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_missing_variable_is_named(cloud, script):
  """No call of gcloud is made without a zone."""
  status, output = cloud.run(script, TPU_ZONE="")

  assert status == 1
  assert "TPU_ZONE is not set; run 'export" in output
  assert cloud.calls() == []


@pytest.mark.parametrize("script", ["create.sh", "setup.sh", "delete.sh"])
def test_an_unknown_argument_is_refused(cloud, script):
  status, output = cloud.run(script, "--spot")

  assert status == 1
  assert "does not take '--spot'" in output
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
def test_create_requests_a_slice_with_the_image_of_its_generation(
  cloud, kind, image
):
  """The kind v5p-8, for example, is of the generation v5p."""
  # The state of the request after it has been made.
  cloud.write("create.1", "ACTIVE")

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


def test_create_waits_until_the_slice_is_ready(cloud):
  # The states of the request, one after the other. ERROR is a failed call.
  cloud.write("create.1", "ACCEPTED", "PROVISIONING", "ERROR", "ACTIVE")

  status, output = cloud.run("create.sh")

  assert status == 0, output
  assert "is ACCEPTED" in output
  assert "is PROVISIONING" in output
  assert "my-slice is ready; next: tools/tpu/setup.sh" in output
  assert len(cloud.calls("queued-resources", "create")) == 1


def test_create_passes_the_options(cloud):
  """Environment variables are the options of create.sh, and flags of gcloud."""
  # The state of the request after it has been made.
  cloud.write("create.1", "ACTIVE")

  status, _ = cloud.run(
    "create.sh",
    TPU_TYPE="v9-8",
    TPU_RUNTIME_VERSION="image",
    TPU_SPOT="1",
    TPU_PROJECT="a project",
  )

  assert status == 0
  (creation,) = cloud.calls("queued-resources", "create")
  assert "--runtime-version=image" in creation
  assert "--spot" in creation
  for call in cloud.calls():
    assert "--project=a project" in call
    assert "--zone=a-zone" in call


def test_create_does_not_guess_the_image_of_an_unknown_generation(cloud):
  """TPU_RUNTIME_VERSION is the name of the image."""
  status, output = cloud.run("create.sh", TPU_TYPE="tpu7x-8")

  assert status == 1
  assert "set TPU_RUNTIME_VERSION as well" in output
  assert cloud.calls("queued-resources", "create") == []


def test_create_says_that_a_zone_has_no_capacity_and_keeps_waiting(cloud):
  # The states of the request, one after the other.
  waiting = ["WAITING_FOR_RESOURCES"] * 4
  cloud.write("create.1", *waiting, "PROVISIONING", "ACTIVE")

  status, output = cloud.run("create.sh")

  assert status == 0, output
  # It says so once, not after each of the four states.
  assert output.count("No capacity for v5litepod-16 in a-zone") == 1
  assert "TPU_ZONE=ANOTHER-ZONE tools/tpu/create.sh" in output
  assert "my-slice is ready" in output


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDED"])
def test_create_reports_a_request_that_ends(cloud, state):
  # The states of the request, one after the other.
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
def test_create_replaces_a_slice_that_is_gone(cloud, request_state, node_state):
  """A request may have failed, or its slice may have been taken away."""
  # The states of the first request and of its slice.
  cloud.write("request", request_state)
  cloud.write("node", node_state)
  # The state of the second request after it has been made.
  cloud.write("create.1", "ACTIVE")

  status, output = cloud.run("create.sh")

  assert status == 0, output
  assert cloud.calls("queued-resources", "delete") == [
    ["my-slice", "--force", "--quiet", "--zone=a-zone"]
  ]
  assert len(cloud.calls("queued-resources", "create")) == 1


def test_create_waits_for_a_request_that_exists(cloud):
  # The states of the request and of its slice, one after the other.
  cloud.write("request", "WAITING_FOR_RESOURCES", "ACTIVE")
  cloud.write("node", "CREATING", "READY")

  status, output = cloud.run("create.sh")

  assert status == 0, output
  assert cloud.calls("queued-resources", "create") == []


def test_create_continues_if_gcloud_fails_once(cloud):
  # The first call that asks for the state of the request fails.
  cloud.write("create.1", "ERROR", "ACTIVE")

  status, output = cloud.run("create.sh")

  assert status == 0, output
  assert len(cloud.calls("queued-resources", "create")) == 1


def test_create_ends_if_gcloud_keeps_failing(cloud):
  # Every call that asks for the state of the request fails.
  cloud.write("request", "ERROR")

  status, output = cloud.run("create.sh")

  assert status == 1
  assert "the network is unreachable" in output
  assert "gcloud failed 5 times in a row" in output


def test_setup_copies_the_working_tree_to_all_workers(cloud):
  """Ignored files, deleted files and files of an earlier copy are missing."""
  repository = cloud.repository
  (repository / ".gitignore").write_text("ignored\n")
  (repository / "ignored").write_text("")
  (repository / "a new file").write_text("")
  # Git still lists a file that has been deleted.
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
    # The folder tools/tpu of the repository has the scripts.
    assert names == {".gitignore", "a new file", "tools"}


def test_setup_installs_the_copy_on_all_workers(cloud):
  cloud.set_up()

  for worker in cloud.workers:
    # The arguments of the two calls of uv on the worker.
    text = (worker / "uv_calls").read_text(encoding="utf-8")
    make_environment, install = text.splitlines()
    assert "--python=3.12" in make_environment.split()
    source = worker / "diffjax/source"
    assert install.endswith(f"--editable {source}[tpu,gcs]")


def test_setup_reports_a_worker_that_gets_no_copy(cloud):
  cloud.write("request", "ACTIVE")
  # With this file, no command succeeds on worker 1.
  cloud.write("workers/1.broken")

  status, output = cloud.run("setup.sh")

  assert status == 1
  assert "No space left on device" in output
  assert "the copy failed on at least one worker" in output
  # The installation, which uses ssh, is not tried.
  assert cloud.calls("tpu-vm", "ssh") == []


def test_setup_reports_a_worker_that_cannot_install(cloud):
  cloud.write("request", "ACTIVE")
  # On worker 1, uv fails with this text.
  cloud.write("workers/1/uv_error", "No solution found")

  status, output = cloud.run("setup.sh")

  assert status == 1
  assert "No solution found" in output
  assert "the installation failed on at least one worker" in output
  assert "next: tools/tpu/train.sh" not in output


def test_train_passes_all_arguments_to_all_workers(running_cloud):
  """A run has been started with arguments that a shell could expand."""
  expected = ["-m", "diffjax.train", *TRAIN, *DIFFICULT]
  for worker in running_cloud.workers:
    assert training_arguments(worker) == expected


def test_a_run_outlives_the_session_that_starts_it(running_cloud):
  """The session of ssh in which the run was started has ended."""
  _, output = running_cloud.run("train.sh", "--status")

  # There are two workers.
  assert output.count(": running: diffjax.train --config=configs/tiny.py") == 2


@pytest.mark.parametrize(
  "arguments",
  [
    pytest.param([*TRAIN, "--seed=1"], id="start"),
    pytest.param(["--keep_alive", *TRAIN, "--seed=1"], id="keep_alive"),
    # The flags of the run in progress begin with these.
    pytest.param(["--keep_alive", *TRAIN], id="keep_alive_with_fewer_flags"),
  ],
)
def test_a_second_run_is_refused(running_cloud, arguments):
  """A slice of two workers trains one run at a time."""
  status, output = running_cloud.run("train.sh", *arguments)

  assert status == 1
  assert "run is in progress" in output
  assert "diffjax.train --config=configs/tiny.py" in output
  first_worker, second_worker = running_cloud.workers
  assert num_runs(first_worker) == 1
  assert num_runs(second_worker) == 1


def test_setup_does_not_replace_the_code_of_a_run_in_progress(running_cloud):
  status, output = running_cloud.run("setup.sh")

  assert status == 1
  assert "stop it first" in output


def test_the_log_can_be_followed_on_a_worker(running_cloud):
  """--follow=1 prints the log of worker 1 while the run goes on."""
  follower = running_cloud.start("train.sh", "--follow=1")

  first_line = follower.stdout.readline()
  line = first_line
  while line != "step 1\n":
    line = follower.stdout.readline()
    assert line, "the log ended"

  assert "starts diffjax.train --config=configs/tiny.py" in first_line
  assert running_cloud.followed_workers() == ["--worker=1"]


def test_following_a_log_ends_with_the_run(ready_cloud):
  """--follow=1 prints the lines of worker 1's log as they are written."""
  ready_cloud.train()
  follower = ready_cloud.start("train.sh", "--follow=1")
  first_line = follower.stdout.readline()
  assert first_line

  ready_cloud.finish(exit_status=3)

  # This raises an error if the command does not end.
  follower.communicate(timeout=20)


def test_the_log_of_a_finished_run_is_shown(ready_cloud):
  """--follow prints the log of worker 0."""
  ready_cloud.train()
  ready_cloud.finish(exit_status=3)
  ready_cloud.wait_for(ready_cloud.has_ended)

  _, output = ready_cloud.run("train.sh", "--follow")

  assert "step 1" in output
  assert "ended with status 3" in output
  assert ready_cloud.followed_workers() == ["--worker=0"]


def test_the_status_shows_how_a_run_ended(ready_cloud):
  ready_cloud.train()
  ready_cloud.finish(exit_status=0)
  ready_cloud.wait_for(ready_cloud.has_ended)

  _, output = ready_cloud.run("train.sh", "--status")

  # There are two workers.
  assert output.count(": ended with status 0: diffjax.train") == 2


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
  """All workers write into one workdir, which no local disk can hold."""
  status, output = cloud.run("train.sh", *flags)

  assert status == 1
  assert message in output
  assert cloud.calls() == []


def test_a_worker_that_cannot_start_stops_the_others(ready_cloud):
  """The others would wait for it in their first step."""
  (ready_cloud.workers[1] / "diffjax/venv/bin/python").unlink()

  status, output = ready_cloud.run("train.sh", *TRAIN)

  assert status == 1
  assert "diffjax is not installed" in output
  assert "stops the others" in output
  assert ready_cloud.has_ended()


def test_train_says_that_a_slice_is_not_set_up(cloud):
  # The request was granted, but setup.sh has not run.
  cloud.write("request", "ACTIVE")

  status, output = cloud.run("train.sh", *TRAIN)

  assert status == 1
  assert "tools/tpu/create.sh && tools/tpu/setup.sh" in output


def test_stop_lets_the_run_save(ready_cloud):
  ready_cloud.train()

  status, output = ready_cloud.run("train.sh", "--stop")

  assert status == 0
  # There are two workers.
  assert output.count(": stopped: ") == 2
  for worker in ready_cloud.workers:
    log = (worker / "diffjax/run/log").read_text(encoding="utf-8")
    assert "saved a checkpoint" in log


def test_the_same_command_starts_a_stopped_run_again(ready_cloud):
  ready_cloud.train()
  ready_cloud.run("train.sh", "--stop")

  ready_cloud.train()

  for worker in ready_cloud.workers:
    ready_cloud.wait_for_run(worker, number=2)


def test_keep_alive_makes_a_slice_and_ends_with_the_run(cloud):
  # The state of the request after it has been made.
  cloud.write("create.1", "ACTIVE")
  watcher = cloud.start("train.sh", "--keep_alive", *TRAIN)
  cloud.wait_for_run(cloud.workers[1])

  cloud.finish(exit_status=0)
  output, _ = watcher.communicate(timeout=20)

  assert watcher.returncode == 0
  assert "the run is complete" in output


def test_keep_alive_resumes_a_preempted_run(ready_cloud):
  """With --keep_alive, a new slice of the same kind continues the run."""
  # The states of the request for the second slice.
  ready_cloud.write("create.1", "WAITING_FOR_RESOURCES", "ACTIVE")
  watcher = ready_cloud.start(
    "train.sh", "--keep_alive", *TRAIN, *DIFFICULT, TPU_SPOT="1"
  )
  worker = ready_cloud.workers[1]
  ready_cloud.wait_for_run(worker)
  first_arguments = training_arguments(worker)

  # The slice is taken away.
  ready_cloud.write("node", "PREEMPTED")
  ready_cloud.wait_for_run(worker, number=2)
  second_arguments = training_arguments(worker)
  ready_cloud.finish(exit_status=0)
  output, _ = watcher.communicate(timeout=20)

  assert watcher.returncode == 0, output
  assert "the slice is PREEMPTED" in output
  assert second_arguments == first_arguments
  (creation,) = ready_cloud.calls("queued-resources", "create")
  assert "--accelerator-type=v5litepod-16" in creation
  assert "--spot" in creation
  assert len(ready_cloud.calls("queued-resources", "delete")) == 1


def test_keep_alive_restarts_after_the_loss_of_one_worker(ready_cloud):
  """Workers compute each step together, so all of them start again."""
  first_worker, lost_worker = ready_cloud.workers
  watcher = ready_cloud.start("train.sh", "--keep_alive", *TRAIN)
  ready_cloud.wait_for_run(first_worker)
  ready_cloud.wait_for_run(lost_worker)

  ready_cloud.finish_worker(lost_worker, exit_status=1)
  ready_cloud.wait_for_run(lost_worker, number=2)
  ready_cloud.finish(exit_status=0)
  output, _ = watcher.communicate(timeout=20)

  assert watcher.returncode == 0, output
  assert "the run is failed, failure 1 of 5 in a row" in output
  assert "worker-1: ended with status 1: " in output
  # The training of this worker did not fail, and yet it started again.
  assert num_runs(first_worker) > 1


def test_keep_alive_gives_up_on_a_run_that_keeps_failing(ready_cloud):
  # Every run ends with an error as soon as it has started.
  ready_cloud.finish(exit_status=1)

  status, output = ready_cloud.run("train.sh", "--keep_alive", *TRAIN)

  assert status == 1
  assert "gives up; the log: " in output
  # The limit is five failures in a row.
  assert num_runs(ready_cloud.workers[0]) == 5


def test_an_interrupted_run_is_not_complete(ready_cloud):
  """At SIGTERM, which a machine sends that shuts down, a run saves and exits.

  Its exit status is then 0, as at the end of the training.
  """
  ready_cloud.train()
  pid_file = ready_cloud.workers[0] / "diffjax/run/pid"
  training_pid = int(pid_file.read_text(encoding="utf-8"))

  os.killpg(os.getpgid(training_pid), signal.SIGTERM)
  ready_cloud.finish_worker(ready_cloud.workers[1], exit_status=0)
  ready_cloud.wait_for(ready_cloud.has_ended)

  _, output = ready_cloud.run("train.sh", "--status")

  assert "worker-0: interrupted: " in output
  assert "worker-1: ended with status 0: " in output


def test_keep_alive_ends_if_the_run_is_stopped(ready_cloud):
  """--keep_alive restarts a run that fails, but not one that a user stops."""
  watcher = ready_cloud.start("train.sh", "--keep_alive", *TRAIN)
  ready_cloud.wait_for_run(ready_cloud.workers[1])

  stop_status, _ = ready_cloud.run("train.sh", "--stop")
  output, _ = watcher.communicate(timeout=20)

  assert stop_status == 0
  assert watcher.returncode == 0
  assert "the run is stopped" in output


def test_delete_says_what_it_deletes(cloud):
  """With --quiet, the script deletes without a question."""
  cloud.write("request", "ACTIVE")

  status, output = cloud.run("delete.sh", "--quiet")

  assert status == 0, output
  assert "the queued resource my-slice, which is ACTIVE" in output
  assert "its node my-slice" in output
  assert cloud.calls("queued-resources", "delete") == [
    ["my-slice", "--force", "--quiet", "--zone=a-zone"]
  ]


def test_delete_asks_first(cloud):
  """Without a terminal nobody can answer, so nothing is deleted."""
  cloud.write("request", "ACTIVE")

  status, output = cloud.run("delete.sh")

  assert status == 1
  assert "nothing was deleted" in output
  assert cloud.calls("queued-resources", "delete") == []


def test_delete_without_a_slice(cloud):
  status, output = cloud.run("delete.sh", "--quiet")

  assert status == 0
  assert "there is no queued resource my-slice" in output
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
