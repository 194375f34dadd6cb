"""`kway k8s`: creates manifests for a Kubernetes cluster."""

from pathlib import Path
from typing import Annotated

import typer

from launch.options import AllowImport

app = typer.Typer(help="Create manifests for a Kubernetes cluster.", no_args_is_help=True)


@app.callback()
def k8s() -> None:
    """Create manifests for a Kubernetes cluster."""


@app.command()
def render(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="recipe (YAML file)")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="recipe overrides, such as optimizer.lr=0.4"),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="number of pods, one per machine")] = 2,
    gpus: Annotated[
        int,
        typer.Option(min=0, help="GPUs per pod, with one rank per GPU; 0: one CPU rank per pod"),
    ] = 1,
    overlay: Annotated[str, typer.Option(help="name of a folder in k8s/overlays")] = "job",
    image: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:TAG",
            help="container image; default: the overlay's image, or its CUDA variant for GPUs",
        ),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="namespace; default: the namespace of kubectl's context")
    ] = None,
    storage_class: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="storage class of the claims; default: the cluster's default"
        ),
    ] = None,
    claims: Annotated[
        bool, typer.Option("--claims/--no-claims", help="also print the PersistentVolumeClaims")
    ] = True,
    allow_import: AllowImport = None,
) -> None:
    """Print the manifests for a training run, to be piped into `kubectl apply -f -`.

    Requires kubectl or kustomize. The number of ranks must fit the recipe's
    mesh and batch. If pods have GPUs, the recipe's train.device is set to cuda.
    CPU and memory requests are proportional to the number of ranks per pod.
    """
    from launch.kubernetes.agreement import check_fit
    from launch.kubernetes.render import Claims, Size, kustomize_command
    from launch.kubernetes.render import render as rendered
    from trainer.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or [], allow_imports=allow_import or ())
    kustomize_command()
    size = Size(nodes, gpus)
    check_fit(resolved, nodes=nodes, ranks=size.ranks)
    text = rendered(
        resolved,
        size,
        overlay=overlay,
        image=image,
        namespace=namespace,
        claims=Claims(storage_class, printed=claims),
    )
    typer.echo(text, nl=False)
