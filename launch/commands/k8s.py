"""`kway k8s`: manifests for a Kubernetes cluster."""

from pathlib import Path
from typing import Annotated

import typer

from launch.options import AllowImport

app = typer.Typer(help="Manifests for a Kubernetes cluster.", no_args_is_help=True)


@app.callback()
def k8s() -> None:
    """Manifests for a Kubernetes cluster."""


@app.command()
def render(
    recipe: Annotated[Path, typer.Argument(help="YAML file")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="such as optimizer.lr=0.4")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="pods, one a machine")] = 2,
    gpus: Annotated[
        int, typer.Option(min=0, help="GPUs of a pod, a rank each; 0: one rank on CPUs")
    ] = 1,
    overlay: Annotated[str, typer.Option(help="folder of k8s/overlays")] = "job",
    image: Annotated[
        str | None,
        typer.Option(metavar="NAME:TAG", help="default: that of the files, with CUDA for GPUs"),
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="default: kubectl's")] = None,
    storage_class: Annotated[
        str | None, typer.Option(metavar="NAME", help="of the claims; default: the cluster's")
    ] = None,
    claims: Annotated[
        bool, typer.Option("--claims/--no-claims", help="whether claims are printed, too")
    ] = True,
    allow_import: AllowImport = None,
) -> None:
    """Print the manifests of a training run, for `kubectl apply -f -`.

    Needs kubectl or kustomize. The recipe, its mesh, the batch and the pods have to agree. The
    recipe's train.device becomes cuda where pods have GPUs; CPU and memory are by the rank.
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
