"""`kway k8s`: creates manifests for a Kubernetes cluster."""

from pathlib import Path
from typing import Annotated

import typer

from launch.commands.serve import check_tokens
from launch.kubernetes.kustomize import Settings
from launch.kubernetes.serving import Server
from launch.options import AllowImport, Given, build, number_range, options_of, with_options
from launch.shipped import OVERRIDES, RECIPE

app = typer.Typer(help="Create manifests for a Kubernetes cluster.", no_args_is_help=True)
render = typer.Typer(no_args_is_help=True)
app.add_typer(
    render,
    name="render",
    help="Print manifests, to be piped into `kubectl apply -f -`. Requires kubectl.",
)


def training(
    given: Given,
    recipe: Annotated[Path, RECIPE],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    nodes: Annotated[int, typer.Option(min=1, help="number of pods, one per machine")] = 2,
    gpus: Annotated[
        int,
        typer.Option(min=0, help="GPUs per pod, with one rank per GPU; 0: one CPU rank per pod"),
    ] = 1,
    overlay: Annotated[str, typer.Option(help="name of a folder in k8s/overlays")] = "job",
    allow_import: AllowImport = None,
) -> None:
    """Print the manifests for a training run.

    The number of ranks must fit the recipe's mesh and batch. If pods have GPUs, the recipe's
    train.device is set to cuda. CPU and memory requests are proportional to the number of ranks
    per pod.
    """
    from launch.kubernetes.kustomize import kustomize_command
    from launch.kubernetes.render import render as rendered
    from trainer.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or [], allow_imports=allow_import or ())
    kustomize_command()
    settings = build(Settings, given)
    typer.echo(rendered(resolved, settings, nodes=nodes, gpus=gpus, overlay=overlay), nl=False)


def serving(
    given: Given,
    replicas: Annotated[
        str,
        typer.Option(
            metavar="N|MIN:MAX",
            help="number of copies of the model, one per pod; MIN:MAX: depending on the load",
        ),
    ] = "2:4",
    allow_import: AllowImport = None,
) -> None:
    """Print the manifests of a server for a bundle.

    The bundle is checked as `kway serve` checks it.
    """
    from launch.kubernetes.kustomize import kustomize_command
    from launch.kubernetes.serving import render_server
    from serving.model import check_imports
    from trainer.backbone.precision import check_device
    from trainer.bundle.bundle import Bundle

    kustomize_command()
    allowed = tuple(allow_import or ())
    settings = build(Settings, {name: given.pop(name) for name in _SETTINGS if name in given})
    server = build(
        Server, given, replicas=number_range("--replicas", replicas), allow_imports=allowed
    )
    if server.token_file is not None:
        check_tokens(server.token_file)
    with Bundle.open(server.bundle) as opened:
        check_device(opened.spec.precision, server.device, on_this_machine=False)
        check_imports(opened, server.device, allowed)
        opened.verify(class_weights=False)
    typer.echo(render_server(server, settings), nl=False)


_SETTINGS = options_of(Settings)
render.command("training")(with_options(training, _SETTINGS))
render.command("serving")(with_options(serving, options_of(Server) | _SETTINGS))
