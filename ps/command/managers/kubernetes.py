"""Kubernetes: a JobSet, and a runtime of Kubeflow Trainer, which makes JobSets. The test checks both against the models that
Kubeflow publishes as kubeflow-trainer-api.
"""

from __future__ import annotations

import shlex
from textwrap import indent

from narrows.ps.command.managers.run_commands import (
    CHECKPOINT_S,
    END_S,
    IMAGE,
    READY,
    REGISTRY,
    SCRIPT,
    RunCommands,
    ShellWord,
    listed,
)

VARIABLES = "$("  # of a command: $(NAME); "$$(" is no variable

CLAIM = """\
# A PersistentVolumeClaim named narrows, ReadWriteMany, keeps checkpoints and the states of the workers' optimizers. A server
# that is lost is started again and goes on from there; a worker that is lost is started again, and joins. Each JobSet has a
# folder of its own, named by its uid: one that is made anew is another run."""


# Exit codes that the next try would end with too: a wrong flag, a key that is refused, another model, and of a worker an error
# of the script.
FINAL_OF_SERVER, FINAL_OF_WORKERS = [2, 4, 5], [1, 2, 4, 5]
USER = 1000  # as in the Dockerfile
POD = f"""\
  restartPolicy: Never  # podFailurePolicy asks for it: a pod that fails is replaced
  securityContext:
    {{runAsNonRoot: true, runAsUser: {USER}, runAsGroup: {USER}, fsGroup: {USER}, seccompProfile: {{type: RuntimeDefault}}}}"""
CONTAINER = """\
securityContext:
  {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}"""


def _pod(name: str, command: list[str], args: list[str], named: bool, more: str, keys: bool, key: str) -> str:
    """The template of a pod with one container. `named`: the name of its set is in JOBSET_NAME. `key`: server or worker."""
    secret = f"{{secretName: narrows-keys, defaultMode: 256, items: [{{key: {key}.key, path: {key}.key}}]}}"
    mounts = [("keys", "/keys", f"secret: {secret}")] if keys else []
    if keys and key == "server":
        mounts += [("members", "/keys/members", "secret: {secretName: narrows-members}")]
    mounts += [("run", "/run/narrows", "persistentVolumeClaim: {claimName: narrows}")]
    # Loaders hand their batches over in shared memory, of which a container has 64 MiB else.
    mounts += [("shm", "/dev/shm", "emptyDir: {medium: Memory}"), ("tmp", "/tmp", "emptyDir: {}")]
    volumes = "".join(f"\n  - name: {each}\n    {what}" for each, _, what in mounts)
    mounted = "".join(f"\n    - {{name: {each}, mountPath: {path}}}" for each, path, _ in mounts)
    labels = {"RUN_ID": "uid"} | ({"JOBSET_NAME": "name"} if named else {})
    paths = {each: f"metadata.labels['jobset.sigs.k8s.io/jobset-{what}']" for each, what in labels.items()}
    variables = "".join(
        f'\n    - {{name: {each}, valueFrom: {{fieldRef: {{fieldPath: "{path}"}}}}}}' for each, path in paths.items()
    )
    return "\n".join(
        (
            "spec:",
            POD,
            f"  terminationGracePeriodSeconds: {CHECKPOINT_S if key == 'server' else END_S}",
            f"  volumes:{volumes}",
            "  containers:",
            f"  - name: {name}",
            f"    image: {REGISTRY}/{IMAGE}  # ps-serve --print dockerfile; put the name of your registry here",
            f"    command: {listed(command, VARIABLES)}",
            *([f"    args: {listed(args, VARIABLES)}"] if args else []),
            f"    env:{variables}",
            f"    volumeMounts:{mounted}",
            indent(CONTAINER, "    "),
            *([indent(more, "    ")] if more else []),
        )
    )


def _policy(container: str) -> str:
    """When a pod that has failed is not tried again, and which failures are none of its own."""
    codes = FINAL_OF_SERVER if container == "ps-serve" else FINAL_OF_WORKERS
    return f"""\
podFailurePolicy:
  rules:
  - {{action: FailJob, onExitCodes: {{containerName: {container}, operator: In, values: {codes}}}}}
  - {{action: Ignore, onPodConditions: [{{type: DisruptionTarget}}]}}"""


def _replicated_jobs(recipe: RunCommands, name: str, folder: str, workers: str, container: str, labels: str) -> str:
    """A server and its workers as the spec of a JobSet: workers start once the server's pod is ready, and the set is done when
    they are.

    name: of the set, or $(JOBSET_NAME). workers, container, labels: names of their job and its container, and what it is marked
    with.
    """
    numbers = [*range(recipe.port, recipe.port + recipe.shards), *(port for _, port in recipe.sites.values())]
    ports = "\n".join(f"- containerPort: {port}" for port in dict.fromkeys(numbers))
    ready = f"ports:\n{ports}\nreadinessProbe:\n  exec: {{command: [test, -e, {READY}]}}\n  periodSeconds: 2\n"
    ready += f'resources: {{requests: {{cpu: "{recipe.shards + 1}", memory: 4Gi}}}}  # of a small model'
    does = 'resources:\n  requests: {cpu: "4", memory: 8Gi}\n  # limits: {nvidia.com/gpu: 1}'
    folder, server_host = ShellWord(f"{folder}/$(RUN_ID)"), ShellWord(f"{name}-server-0-0.{name}")
    serve = recipe.serve(folder, ShellWord("$(RUN_ID)"), "--ready-file", READY, keys="/keys")
    work = recipe.work(server_host, folder, script=[], keys="/keys")
    keys, named = bool(recipe.keys), name.startswith("$")
    server = indent(_pod("ps-serve", serve, [], named, ready, keys, "server"), " " * 8)
    node = indent(_pod(container, work, SCRIPT, named, does, keys, "worker"), " " * 8)
    return f"""\
successPolicy: {{operator: All, targetReplicatedJobs: [{workers}]}}
failurePolicy:
  maxRestarts: 10
  rules:
  - {{name: final, action: FailJobSet, onJobFailureReasons: [PodFailurePolicy]}}
replicatedJobs:
- name: server
  replicas: 1
  template:
    spec:
      completionMode: Indexed
      completions: 1
      parallelism: 1
      backoffLimit: 10
{indent(_policy("ps-serve"), "      ")}
      template:
{server}
- name: {workers}
  replicas: 1
  dependsOn:
  - {{name: server, status: Ready}}
  template:{labels}
    spec:
      completionMode: Indexed
      completions: {recipe.workers}
      parallelism: {recipe.workers}
      backoffLimit: 100
{indent(_policy(container), "      ")}
      template:
{node}
"""


def _secrets(recipe: RunCommands) -> str:
    return recipe.note("".join(
        f"\n#   kubectl create secret generic {name} --from-file={shlex.quote(recipe.keys + folder)}"
        for name, folder in (("narrows-keys", ""), ("narrows-members", "/members"))
    ))  # fmt: skip


def jobset(recipe: RunCommands) -> str:
    jobs = _replicated_jobs(recipe, "narrows", "/run/narrows", "workers", "ps-worker", "")
    return f"""\
# Narrows on Kubernetes: kubectl apply -f FILE. It needs JobSet (jobset.sigs.k8s.io), the image of --print dockerfile with
# {SCRIPT[0]} in it.
{CLAIM}
{_secrets(recipe)}
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: narrows
spec:
{indent(jobs, "  ")}"""


def kubeflow(recipe: RunCommands) -> str:
    """A runtime, and a TrainJob of it: as many of those as wanted, each with a name, a script and checkpoints of its own. The
    controller gives arguments to the container `node` of the job that it finds by the label."""
    labels = "\n    metadata:\n      labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}"
    jobs = _replicated_jobs(recipe, "$(JOBSET_NAME)", "/run/narrows/$(JOBSET_NAME)", "node", "node", labels)
    return f"""\
# Narrows on Kubeflow Trainer 2: kubectl apply -f FILE. It needs the image of --print dockerfile with {SCRIPT[0]} in it.
{CLAIM}
# A TrainJob of another name is another run; with numNodes it cannot have another number of workers than the runtime.
{_secrets(recipe)}
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata:
  name: narrows
  labels: {{trainer.kubeflow.org/framework: narrows}}
spec:
  mlPolicy: {{numNodes: {recipe.workers}}}
  template:
    spec:
{indent(jobs, "      ")}---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: run-1
spec:
  runtimeRef: {{apiGroup: trainer.kubeflow.org, kind: TrainingRuntime, name: narrows}}
  trainer:
    args: {listed(SCRIPT)}
"""
