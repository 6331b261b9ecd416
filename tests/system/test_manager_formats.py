"""The output of ps-serve --print: it parses, and each command in it is one that the parsers of its flags take."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner
from kit.processes import ROOT, until

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.flags import RUN_FLAGS, given
from narrows.ps.command import cli as serve
from narrows.ps.command.managers import formats, kubernetes
from narrows.ps.command.managers.formats import FORMATS
from narrows.ps.command.managers.run_commands import TEMPLATES, filled
from narrows.ps.command.serve import checked
from narrows.worker.command import cli as worker
from narrows.worker.command.launcher import CHILD_END_S
from narrows.worker.command.options import checked as worker_checked

FLAGS = "--workers 4 --shards 2 --sync local --local-steps 8 --compress topk:0.11+sign --bind tcp://0.0.0.0:6001"
VARIANTS = [FLAGS, f"{FLAGS} --keys /srv/run/KEYS", "--sync gossip --workers 3"]


def printed(form: str, flags: str, *more: str) -> str:
    result = CliRunner().invoke(serve.command, ["--print", form, *flags.split(), *more], standalone_mode=False)
    assert result.exception is None and result.return_value == 0, result
    return result.output


def scripts(form: str, text: str) -> Iterator[str]:
    """The shell in it."""
    if form == "slurm":
        yield text
    elif form in ("sky", "dstack"):
        document = yaml.safe_load(text)
        yield from (document["setup"], document["run"]) if form == "sky" else document["commands"]


def commands(form: str, text: str) -> Iterator[list[str]]:
    """Each ps-serve and ps-worker that it starts."""
    for script in scripts(form, text):
        for line in script.splitlines():
            if found := re.match(r"\s*(?:srun --het-group=1 )?(ps-(?:serve|worker) .*?)(?: &| \|\| exit)?$", line):
                yield shlex.split(found[1])
    if form == "compose":
        yield from (service["command"] for service in yaml.safe_load(text)["services"].values())
    if form in ("jobset", "kubeflow"):
        for job in job_set(form, text)["replicatedJobs"]:
            (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
            yield container["command"] + container.get("args", [])


def job_set(form: str, text: str) -> dict[str, Any]:
    """The spec of the JobSet in it."""
    spec: dict[str, Any] = next(yaml.safe_load_all(text))["spec"]
    return spec if form == "jobset" else spec["template"]["spec"]


def parsed(words: list[str]) -> dict[str, Any]:
    command: click.Command = serve.command if words[0] == "ps-serve" else worker.command
    with command.make_context(words[0], words[1:], **command.context_settings) as context:
        return dict(context.params)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


@pytest.mark.parametrize("flags", VARIANTS)
@pytest.mark.parametrize("form", [form for form in FORMATS if form not in ("dockerfile", "ray")])
def test_each_command_is_one_that_our_parsers_take(form: str, flags: str) -> None:
    text = printed(form, flags)
    seen = [*commands(form, text)]
    names, folder = [words[0] for words in seen], ""
    assert names == ["ps-serve", *["ps-serve", "ps-worker"] * 2] if form == "compose" else ["ps-serve", "ps-worker"]
    for words in seen:
        told = [word.replace("$server", "tcp://name:1") if word == "$server" else word for word in words]
        params = parsed([re.sub(r"\$[{(]?\w+[})]?", "name", word) for word in told])
        if words[0] == "ps-serve":
            settings = Settings(**given(params)).validated()
            checked(settings, params["bind"], params["parent"], not (params["keys"] or params["insecure"]))
            assert (folder := params["checkpoint_dir"])
        else:
            script = "train.py" if params["command"] == ("$@",) else params["command"][0]
            key = params.pop("key")
            assert key == ("" if "--keys" not in flags or form == "compose" else key) and key.endswith(
                ("worker.key", "")
            )
            options = worker_checked(**params | {"command": (script,), "key": ""})
            assert options.server.startswith("tcp://") and options.connect_timeout == 300
            # In a city of compose the server has the moments.
            assert params["checkpoint_dir"] == ("" if form == "compose" else folder)
    for script in scripts(form, text):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


ODD = """/tmp/a b$(touch x)`touch x`"$HOME'q:c"""  # a folder of keys, whose name each reader must take as it is


@pytest.mark.parametrize("form", [form for form, (_, taken) in FORMATS.items() if "keys" in taken])
def test_a_value_of_the_user_stays_what_it_is(form: str, tmp_path: Path) -> None:
    text = printed(form, "", "--keys", ODD)
    for comment in re.findall("^ *# *(?:Keys, once: )?((?:ps-serve|kubectl) .*)", text, re.M):
        echo = "ps-serve() { printf '%s\\n' \"$@\"; }; kubectl() { printf '%s\\n' \"${@##*=}\"; }; "
        told = subprocess.run(["bash", "-c", echo + comment], capture_output=True, text=True, cwd=tmp_path).stdout
        assert ODD in told.replace("/members\n", "\n").splitlines()
    if form == "slurm":
        for words, flag in zip(commands(form, text), ("--keys", "--key"), strict=True):
            (line,) = [line for line in text.splitlines() if f"{words[0]} --" in line]
            line = line.strip().removeprefix("srun --het-group=1 ").removesuffix(" &").removeprefix(words[0])
            told = subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True).stdout
            assert f"{flag}\n{ODD}" in told
    elif form == "compose":
        mounts = [each for service in yaml.safe_load(text)["services"].values() for each in service.get("volumes", ())]
        sources = [each["source"] for each in mounts if each["target"].startswith("/keys")]
        assert [re.sub(r"[$][$]", "$", each) for each in sources] == [ODD, f"{ODD}/leipzig.key", f"{ODD}/jena.key"]
        assert not any(re.search(r"(?<![$])[$](?![$])", each) for each in sources), "an engine would replace it"
    elif form == "sky":
        assert yaml.safe_load(text)["file_mounts"]["/keys"] == ODD
    elif form == "dstack":
        assert yaml.safe_load(text)["files"] == [{"local_path": ODD, "path": "/keys"}]


@pytest.mark.parametrize("form", ["slurm", "jobset", "compose"])
def test_a_host_of_a_page_is_no_variable(form: str) -> None:
    text = printed(form, "--insecure", "--metrics", "$(id):9100")
    (server, *_) = commands(form, text)
    told = server[next(i for i, word in enumerate(server) if word.startswith("--metrics="))]
    expected = {"slurm": "--metrics=$(id):9100", "jobset": "--metrics=$$(id):9100", "compose": "--metrics=0.0.0.0:9100"}
    assert told == expected[form]
    assert form != "slurm" or "'--metrics=$(id):9100'" in text


def test_a_folder_of_keys_whose_name_ends_a_comment_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be printed"):
        CliRunner().invoke(
            serve.command, ["--print", "slurm", "--keys", "a\nid"], standalone_mode=False, catch_exceptions=False
        )


def test_a_warning_of_slurm_is_another_signal_than_that_of_scancel() -> None:
    """Else a job that is cancelled asks for a requeue."""
    text = printed("slurm", FLAGS)
    (warning,) = re.findall(r"^#SBATCH --signal=B:(\w+)@120$", text, re.M)
    assert re.findall(r"^trap '(again=1; )?stop' (\w+)", text, re.M) == [
        ("again=1; ", warning),
        ("", "TERM"),
    ]


# Each stands for a command of Slurm or of ours, and says in `said` what it was for. srun kills where it gets a SIGTERM.
STAND_INS = {
    "ps-serve": """trap 'echo checkpoint >> said; touch ended; exit 143' TERM
        echo '{"address": "tcp://here:41234", "ports": [41234]}' > narrows-7.ready
        until [ -e finished ]; do sleep 0.05; done; touch ended""",
    "srun": """echo "$@" >> asked; trap 'echo killed >> said; exit 137' TERM
        touch begun; until [ -e ended ] || [ -e preempted ]; do sleep 0.05; done; sleep 0.5
        echo "workers end" >> said; [ ! -e preempted ] || exit 143; [ -e finished ] || exit 6""",
    "scontrol": """[ "$1" = requeue ] && echo "$@" >> said
        [ -e preempted ] && echo "   PreemptEligibleTime=2026-11-25T23:05:57 PreemptTime=2026-11-25T23:06:35" """,
}


@pytest.mark.parametrize(("happens", "code", "said"), [
    (signal.SIGUSR1, 0, ["checkpoint", "workers end", "requeue 7"]),  # its time is nearly over
    (signal.SIGTERM, 6, ["checkpoint", "workers end"]),  # scancel
    ("preempted", 0, ["workers end", "checkpoint", "requeue 7"]),
    ("finished", 0, ["workers end"]),
])  # fmt: skip
def test_what_ends_a_job_of_slurm(happens: Any, code: int, said: list[str], tmp_path: Path) -> None:
    """Workers end by themselves, after the server it may be; a job that is to go on is queued again."""
    for name, does in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    (tmp_path / "run.sbatch").write_text(printed("slurm", FLAGS))
    with subprocess.Popen(["bash", "run.sbatch", "train.py"], env=env, cwd=tmp_path, start_new_session=True) as job:
        try:
            until((tmp_path / "begun").exists, "the workers")
            if isinstance(happens, str):
                (tmp_path / happens).touch()
            else:
                job.send_signal(happens)
            assert job.wait(60) == code
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    assert (tmp_path / "said").read_text().splitlines() == said
    assert not (tmp_path / "narrows-7.ready").exists()
    asked = (tmp_path / "asked").read_text()
    assert "--checkpoint-dir narrows-7 " in asked  # that of the server, on a disk of all nodes
    assert "--server tcp://here:41234 " in asked


@pytest.mark.parametrize("form", [form for form, (_, taken) in FORMATS.items() if "journal" in taken])
def test_a_flag_goes_along_or_is_refused(form: str) -> None:
    flags = ["--parent-timeout", "30", "--host", "a", "--plan", "p", "--record", "r"]
    for flag, value in (*zip(flags[::2], flags[1::2], strict=True), ("--join", "tcp://a:1"), ("--ready-file", "f")):
        with pytest.raises(UsageError, match=re.escape(f"--print {form}: leave out {flag}: ")):
            CliRunner().invoke(
                serve.command, ["--print", form, flag, value], standalone_mode=False, catch_exceptions=False
            )
    text = printed(form, "--no-journal")
    if form == "ray":
        assert "journal=False" in text
    for words in commands(form, text):
        assert words[0] == "ps-worker" or "--no-journal" in words
    if "dashboard" not in FORMATS[form][1]:
        with pytest.raises(UsageError, match="leave out --dashboard: "):
            CliRunner().invoke(
                serve.command, ["--print", form, "--dashboard"], standalone_mode=False, catch_exceptions=False
            )


@pytest.mark.parametrize("form", ["slurm", "jobset", "kubeflow", "compose"])
def test_who_looks_at_a_run_finds_its_page_and_metrics(form: str) -> None:
    text = printed(form, "--dashboard --metrics 0.0.0.0:9100 --insecure")
    seen = [parsed(words) for words in commands(form, text) if words[0] == "ps-serve"]
    host = "0.0.0.0" if form == "compose" else "127.0.0.1"  # of a container's loopback nobody else sees anything
    assert (seen[0]["dashboard"], seen[0]["metrics"]) == (f"{host}:5550", "0.0.0.0:9100")
    assert not any(params["dashboard"] or params["metrics"] for params in seen[1:])  # a city's
    if form == "compose":
        above = yaml.safe_load(text)["services"]["above"]
        assert above["ports"] == ["127.0.0.1:5550:5550", "0.0.0.0:9100:9100"]
    elif form != "slurm":
        (container,) = job_set(form, text)["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
        assert [each["containerPort"] for each in container["ports"]] == [5555, 5550, 9100]


def test_the_flags_arrive() -> None:
    (server, *_) = commands("slurm", printed("slurm", FLAGS))
    params = parsed(server)
    assert given(params) == {"workers": 4, "shards": 2, "sync": "local", "local_steps": 8, "compress": "topk:0.11+sign"}
    assert params["bind"] == "tcp://0.0.0.0:6001" and params["insecure"] and params["resume"]
    (server, own) = commands("slurm", printed("slurm", "--bind tcp://127.0.0.1:6001"))
    assert parsed(server)["bind"] == "tcp://127.0.0.1:6001" and not parsed(server)["insecure"]  # for one machine
    assert own[2] == "$server"  # as the ready file says
    (server, _) = commands("slurm", printed("slurm", ""))
    assert parsed(server)["bind"] == "tcp://0.0.0.0:0", "two jobs may share a node"


@pytest.mark.parametrize("form", ["jobset", "kubeflow"])
def test_what_a_jobset_waits_for_and_when_it_is_done(form: str) -> None:
    spec = job_set(form, printed(form, f"{FLAGS} --keys KEYS"))
    server, workers = spec["replicatedJobs"]
    assert workers["dependsOn"] == [{"name": "server", "status": "Ready"}]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": [workers["name"]]}
    assert (
        workers["template"]["spec"]["completions"] == 4 and workers["template"]["spec"]["completionMode"] == "Indexed"
    )
    pods = [job["template"]["spec"]["template"]["spec"] for job in (server, workers)]
    (container,) = pods[0]["containers"]
    assert [port["containerPort"] for port in container["ports"]] == [6001, 6002]
    assert container["readinessProbe"]["exec"]["command"][-1] == parsed(container["command"])["ready_file"]
    secrets = [[item["key"] for item in pod["volumes"][0]["secret"]["items"]] for pod in pods]
    assert secrets == [["server.key"], ["worker.key"]]  # a worker does not see the server's
    claims = [volume["persistentVolumeClaim"] for pod in pods for volume in pod["volumes"] if volume["name"] == "run"]
    assert claims == [{"claimName": "narrows"}] * 2  # moments of the workers are there, too
    for pod in pods:
        assert {each["name"] for each in pod["volumes"]} == {
            each["name"] for each in pod["containers"][0]["volumeMounts"]
        }


@pytest.mark.parametrize("form", ["jobset", "kubeflow"])
def test_a_pod_is_hardened_and_one_with_an_error_is_not_tried_again(form: str) -> None:
    spec = job_set(form, printed(form, f"{FLAGS} --keys KEYS"))
    final = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    assert spec["failurePolicy"]["rules"] == [final]
    for job in spec["replicatedJobs"]:
        job_spec = job["template"]["spec"]
        pod = job_spec["template"]["spec"]
        (container,) = pod["containers"]
        final, disrupted = job_spec["podFailurePolicy"]["rules"]
        assert final["action"] == "FailJob" and final["onExitCodes"]["containerName"] == container["name"]
        # A flag, a key, a model, and of workers the script; not a server that is not there yet, or is lost.
        codes = [2, 4, 5] if container["name"] == "ps-serve" else [1, 2, 4, 5]
        assert final["onExitCodes"]["values"] == codes
        assert disrupted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
        assert pod["restartPolicy"] == "Never", "which a podFailurePolicy asks for"
        context, own = pod["securityContext"], container["securityContext"]
        assert context["runAsNonRoot"] and context["fsGroup"] == context["runAsGroup"]
        assert own["readOnlyRootFilesystem"] and own["capabilities"] == {"drop": ["ALL"]}
        places = {each["mountPath"] for each in container["volumeMounts"]}
        assert {"/tmp", "/dev/shm", "/run/narrows", "/keys"} <= places
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert re.fullmatch(r"[\w.-]+/narrows:\d[\w.]*", container["image"]), "a registry, and a version that stays"
    server, node = (job["template"]["spec"]["template"]["spec"] for job in spec["replicatedJobs"])
    assert server["terminationGracePeriodSeconds"] > node["terminationGracePeriodSeconds"] > CHILD_END_S
    assert "# limits: {nvidia.com/gpu: 1}" in printed(form, FLAGS)


def test_an_image_has_no_keys() -> None:
    """What the image gets is named; and the context of a build leaves keys out."""
    copied = re.findall(r"^COPY (.*)$", printed("dockerfile", ""), re.M)
    assert copied and not any(word in (".", "*") for line in copied for word in line.split()[:-1])
    assert all((ROOT / word).exists() for line in copied for word in line.split()[:-1] if word != "train.py")
    assert {"KEYS*", "**/*.key"} <= set((ROOT / ".dockerignore").read_text().split())


def holds(known: Any, said: Any) -> bool:
    """Whether all that was said is known; defaults may be beside it."""
    if isinstance(said, dict):
        return isinstance(known, dict) and all(holds(known.get(name), value) for name, value in said.items())
    if isinstance(said, list):
        return isinstance(known, list) and len(known) == len(said) and all(map(holds, known, said))
    return bool(known == said)


def test_kubernetes_knows_each_field() -> None:
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
    from kubeflow_trainer_api.models.trainer_v1alpha1_training_runtime import TrainerV1alpha1TrainingRuntime

    models = {
        "JobSet": JobsetV1alpha2JobSet,
        "TrainingRuntime": TrainerV1alpha1TrainingRuntime,
        "TrainJob": TrainerV1alpha1TrainJob,
    }
    for form, flags in itertools.product(("jobset", "kubeflow"), VARIANTS):
        for document in yaml.safe_load_all(printed(form, flags)):
            model = models[document["kind"]]
            assert holds(model.from_dict(document).to_dict(), document)  # a field that it does not know is lost
            wrong = document | {"spec": document["spec"] | {"sepc": 1}}
            assert not holds(model.from_dict(wrong).to_dict(), wrong)


def test_a_train_job_is_a_run_of_its_own() -> None:
    """As the controller of Kubeflow Trainer makes a JobSet of it: with its name, its arguments and the runtime's numNodes."""
    runtime, job = yaml.safe_load_all(printed("kubeflow", FLAGS))
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    server, node = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert node["template"]["metadata"]["labels"] == label and "metadata" not in server["template"]
    assert node["replicas"] == server["replicas"] == 1  # which the controller sets, or asks for
    serves, trains = (each["template"]["spec"]["template"]["spec"]["containers"][0] for each in (server, node))
    assert trains["name"] == "node" and serves["name"] != "node"
    for each in (serves, trains):
        paths = {variable["name"]: variable["valueFrom"]["fieldRef"]["fieldPath"] for variable in each["env"]}
        assert paths == {
            name: f"metadata.labels['jobset.sigs.k8s.io/jobset-{what}']"
            for name, what in (("RUN_ID", "uid"), ("JOBSET_NAME", "name"))
        }
    words = [word.replace("$(JOBSET_NAME)", "run-1") for word in (*serves["command"], "|", *trains["command"])]
    words = [word.replace("$(RUN_ID)", "b7") for word in words]
    params, own = parsed(words[: words.index("|")]), words[words.index("|") + 1 :]
    assert params["checkpoint_dir"].endswith("/run-1/b7") and params["run_id"] == "b7"
    assert params["workers"] == runtime["spec"]["mlPolicy"]["numNodes"]
    assert parsed([*own, *job["spec"]["trainer"]["args"]])["server"] == "tcp://run-1-server-0-0.run-1:6001"


def test_services_of_compose_reach_each_other() -> None:
    services = yaml.safe_load(printed("compose", f"{FLAGS} --keys KEYS"))["services"]
    for name, service in services.items():
        params = parsed(service["command"])
        for address in (params.get("server") or params.get("parent"),):
            if address:
                other = services[address.removeprefix("tcp://").partition(":")[0]]
                assert set(service["networks"]) & set(other["networks"]), name
        assert set(service.get("depends_on", {})) <= set(services)
    assert parsed(services["above"]["command"])["workers"] == 2


def test_the_script_for_ray_calls_a_function_with_its_own_parameters() -> None:
    (call,) = [
        node
        for node in ast.walk(ast.parse(printed("ray", f"{FLAGS} --keys KEYS")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "train"
    ]
    told = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert told["workers"] == (1, 4) and told["shards"] == 2 and told["keys"] == os.path.abspath("KEYS")
    assert told["sync"] == "local" and told["local_steps"] == 8
    assert told["checkpoint_dir"] == "/shared/narrows"  # else the model is on the disk of one node
    (train,) = [
        node for node in ast.parse((ROOT / "worker" / "integrations" / "ray.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "train"
    ]  # fmt: skip
    assert told.keys() <= {each.arg for each in train.args.kwonlyargs} | {name for name, *_ in RUN_FLAGS}


@pytest.mark.parametrize(("flags", "why"), [
    ("--print systemd", "--print systemd: the formats are slurm, jobset"),
    ("--print slurm --sync sometimes", "--sync sometimes: unknown mode"),
    ("--print slurm --compress int9", "--compress int9"),
    ("--print slurm --parent tcp://a:1", "leave out --parent"),
    ("--print compose --dashboard 0", "--dashboard 0: name a port"),
    ("--print compose --metrics 0.0.0.0:9", "--keys or --insecure"),
    ("--print dockerfile --workers 2", "--print dockerfile: leave out --workers"),
])  # fmt: skip
def test_what_cannot_be_printed_is_named(flags: str, why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        CliRunner().invoke(serve.command, flags.split(), standalone_mode=False, catch_exceptions=False)


def test_a_template_takes_values_and_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrows.ps.command.managers.run_commands.TEMPLATES", tmp_path)
    (tmp_path / "odd.template").write_text("a: {{{ a }}: {{ b }}}\n  {{ block }}\n{{ none }}\n  end {{ a }}")
    text = filled("odd", a="{{ b }}", b=1, block="x\n  y\n\nz\n", none="")
    assert text == "a: {{{ b }}: 1}\n  x\n    y\n\n  z\n  end {{ b }}"
    with pytest.raises(KeyError, match="none"):
        filled("odd", a="", b="", block="")


def test_each_template_is_used() -> None:
    used = {
        node.args[0].value
        for module in (formats, kubernetes)
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "filled"
        if isinstance(node.args[0], ast.Constant)
    }
    assert used == {Path(file.name).stem for file in TEMPLATES.iterdir()}


def test_help_names_each_format() -> None:
    option = next(each for each in serve.command.params if each.name == "print")
    assert isinstance(option, click.Option) and option.help is not None
    assert all(re.search(rf"\b{form}\b", option.help) for form in FORMATS)
