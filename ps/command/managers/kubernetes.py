"""The files for Kubernetes: a JobSet, and a runtime of Kubeflow Trainer, which makes JobSets.

The test checks both against the models that Kubeflow publishes as kubeflow-trainer-api.

How it works

templates/jobset.template and kubeflow.template are the two files. Both contain the jobs of replicated_jobs.template:
the server and the workers, each with a pod of pod.template. A pod mounts shared memory, through which loaders hand
their batches over: without the mount a container has 64 MiB.
"""

from __future__ import annotations

import shlex

from narrows.ps.command.managers.run_commands import (
    CHECKPOINT_S,
    END_S,
    READY,
    SCRIPT,
    RunCommands,
    ShellWord,
    filled,
    listed,
)

VARIABLES = "$("  # a command has variables as $(NAME); "$$(" is an escaped "$("
# Exit codes with which the next try would end too: a wrong flag, a refused key, another model, and for workers an error
# of the script.
FINAL_OF_SERVER, FINAL_OF_WORKERS = [2, 4, 5], [1, 2, 4, 5]
SET_NAME = (
    """- {name: JOBSET_NAME, valueFrom: {fieldRef: {fieldPath: "metadata.labels['jobset.sigs.k8s.io/jobset-name']"}}}"""
)
STEP = (
    "metadata:\n  labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}"  # how Kubeflow finds the workers' job
)


def _secrets(keys: bool, key: str) -> dict[str, str]:
    """Return the volumes and mounts of a pod's keys.

    Args:
        keys: the run has keys.
        key: the file of the folder of keys that the pod gets, "server" or "worker".
    """
    if not keys:
        return {"key_volumes": "", "key_mounts": ""}
    secret = f"{{secretName: narrows-keys, defaultMode: 256, items: [{{key: {key}.key, path: {key}.key}}]}}"
    volumes, mounts = [f"- name: keys\n  secret: {secret}"], ["- {name: keys, mountPath: /keys}"]
    if key == "server":
        volumes.append("- name: members\n  secret: {secretName: narrows-members}")
        mounts.append("- {name: members, mountPath: /keys/members}")
    return {"key_volumes": "\n".join(volumes), "key_mounts": "\n".join(mounts)}


def _replicated_jobs(
    recipe: RunCommands, name: str, folder: str, job: str, container: str, labels: str = "", set_name: str = ""
) -> str:
    """Return a server and its workers as the spec of a JobSet.

    The workers start once the server's pod is ready. The set is done when the workers are.

    Args:
        recipe: the commands of both.
        name: the name of the set, or $(JOBSET_NAME).
        folder: the folder of this set's checkpoints in the mounted volume.
        job, container: the names of the workers' job and of its container.
        labels: the labels of the workers' job.
        set_name: the definition of the variable JOBSET_NAME for a container, if `name` uses it.
    """
    numbers = [*range(recipe.port, recipe.port + recipe.shards), *(port for _, port in recipe.sites.values())]
    ports = "\n".join(f"- containerPort: {port}" for port in dict.fromkeys(numbers))
    folder, server_host = ShellWord(f"{folder}/$(RUN_ID)"), ShellWord(f"{name}-server-0-0.{name}")
    serve = recipe.serve(folder, ShellWord("$(RUN_ID)"), "--ready-file", READY, keys="/keys")
    work = recipe.work(server_host, folder, script=[], keys="/keys")
    server = filled(
        "pod",
        container="ps-serve",
        grace_s=CHECKPOINT_S,
        command=listed(serve, VARIABLES),
        args="",
        set_name=set_name,
        needs=filled("needs_of_server", ports=ports, cpus=recipe.shards + 1),
        **_secrets(bool(recipe.keys), "server"),
    )
    node = filled(
        "pod",
        container=container,
        grace_s=END_S,
        command=listed(work, VARIABLES),
        args=f"args: {listed(SCRIPT, VARIABLES)}",
        set_name=set_name,
        needs=filled("needs_of_worker"),
        **_secrets(bool(recipe.keys), "worker"),
    )
    return filled(
        "replicated_jobs",
        job=job,
        container=container,
        labels=labels,
        workers=recipe.workers,
        server=server,
        node=node,
        final_of_server=FINAL_OF_SERVER,
        final_of_workers=FINAL_OF_WORKERS,
    )


def _note(recipe: RunCommands) -> str:
    return recipe.note("".join(
        f"\n#   kubectl create secret generic {name} --from-file={shlex.quote(recipe.keys + folder)}"
        for name, folder in (("narrows-keys", ""), ("narrows-members", "/members"))
    ))  # fmt: skip


def jobset(recipe: RunCommands) -> str:
    jobs = _replicated_jobs(recipe, "narrows", "/run/narrows", "workers", "ps-worker")
    return filled("jobset", note=_note(recipe), jobs=jobs)


def kubeflow(recipe: RunCommands) -> str:
    """Return a runtime, and a TrainJob that uses it.

    The user may make any number of TrainJobs, each with its own name, script and checkpoints. The controller of
    Kubeflow hands the arguments of a TrainJob to the container `node` of the job with the label STEP.
    """
    folder = "/run/narrows/$(JOBSET_NAME)"
    jobs = _replicated_jobs(recipe, "$(JOBSET_NAME)", folder, "node", "node", STEP, SET_NAME)
    return filled("kubeflow", note=_note(recipe), jobs=jobs, workers=recipe.workers, args=listed(SCRIPT))
