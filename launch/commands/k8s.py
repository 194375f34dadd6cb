"""`kway k8s`: creates manifests for a Kubernetes cluster."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from launch.commands.serve import check_tokens, replica_range
from launch.options import AllowImport
from launch.shipped import RECIPE

app = typer.Typer(help="Create manifests for a Kubernetes cluster.", no_args_is_help=True)


@app.callback()
def k8s() -> None:
    """Create manifests for a Kubernetes cluster."""


class _Render(TyperGroup):
    """Makes `kway k8s render RECIPE` short for `kway k8s render training RECIPE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["training", *args]
        return super().parse_args(ctx, args)


render = typer.Typer(cls=_Render, no_args_is_help=True)
app.add_typer(render, name="render")

Image = Annotated[
    str | None,
    typer.Option(
        metavar="NAME:TAG",
        help="container image; default: the overlay's image, or its CUDA variant for GPUs",
    ),
]
Namespace = Annotated[
    str | None, typer.Option(help="namespace; default: the namespace of kubectl's context")
]
StorageClass = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="storage class of the claims; default: the cluster's default"
    ),
]
PrintClaims = Annotated[
    bool, typer.Option("--claims/--no-claims", help="also print the PersistentVolumeClaims")
]


@render.callback()
def render_group() -> None:
    """Print manifests, to be piped into `kubectl apply -f -`. Requires kubectl or kustomize.

    `kway k8s render RECIPE` is short for `kway k8s render training RECIPE`.
    """


@render.command()
def training(
    recipe: Annotated[Path, RECIPE],
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
    image: Image = None,
    namespace: Namespace = None,
    storage_class: StorageClass = None,
    claims: PrintClaims = True,
    allow_import: AllowImport = None,
) -> None:
    """Print the manifests for a training run.

    The number of ranks must fit the recipe's mesh and batch. If pods have GPUs, the recipe's
    train.device is set to cuda. CPU and memory requests are proportional to the number of ranks
    per pod.
    """
    from launch.kubernetes.kustomize import Settings, kustomize_command
    from launch.kubernetes.render import render as rendered
    from trainer.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or [], allow_imports=allow_import or ())
    kustomize_command()
    settings = Settings(image, namespace, storage_class, has_claims=claims)
    text = rendered(resolved, settings, nodes=nodes, gpus=gpus, overlay=overlay)
    typer.echo(text, nl=False)


@render.command()
def serving(
    bundle: Annotated[
        Path,
        typer.Argument(
            metavar="BUNDLE",
            help="bundle folder: bundles/NAME, which the pods read from the claim `bundles`",
        ),
    ],
    kind: Annotated[
        Literal["deployment", "rayservice", "kserve"],
        typer.Option(
            help="deployment: pods of `kway serve`; rayservice: a Ray cluster (KubeRay); "
            "kserve: an InferenceService"
        ),
    ] = "deployment",
    replicas: Annotated[
        str,
        typer.Option(
            metavar="N|MIN:MAX",
            help="number of copies of the model, one per pod; MIN:MAX: depending on the load",
        ),
    ] = "2:4",
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="cuda: one GPU for each copy of the model")
    ] = "cpu",
    cpus: Annotated[int, typer.Option(min=1, help="CPU cores for each copy of the model")] = 2,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="QUANTITY",
            help="memory for each copy of the model, such as 6Gi; default: 4Gi, or 8Gi for a "
            "rayservice",
        ),
    ] = None,
    in_image: Annotated[
        bool,
        typer.Option(
            "--in-image",
            help="the image contains the bundle, at /usr/share/kway/NAME; no claim is required",
        ),
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            readable=False,
            help="also print the Secret kway-tokens with the tokens in this file; default: the "
            "Secret must already exist",
        ),
    ] = None,
    no_tokens: Annotated[
        bool,
        typer.Option("--no-tokens", help="do not require tokens from clients"),
    ] = False,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="DNS name of the server: also print a Gateway with TLS and its routes; default: "
            "the server is reachable only in the cluster",
        ),
    ] = None,
    gateway_class: Annotated[
        str, typer.Option(metavar="NAME", help="GatewayClass of the Gateway")
    ] = "envoy-gateway",
    tls_secret: Annotated[
        str, typer.Option(metavar="NAME", help="Secret with the certificate of --host")
    ] = "kway-tls",
    edge_limits: Annotated[
        bool,
        typer.Option(
            "--edge-limits/--no-edge-limits",
            help="also print the policies of Envoy Gateway that limit rates and body sizes",
        ),
    ] = True,
    grpc: Annotated[
        bool, typer.Option("--grpc", help="also serve the Open Inference Protocol over gRPC")
    ] = False,
    surge: Annotated[
        bool,
        typer.Option(
            "--surge/--no-surge",
            help="no surge: an upgrade needs no room for more pods. A deployment stops one pod "
            "before it starts the next; a rayservice does not start a second Ray cluster",
        ),
    ] = True,
    incremental_upgrade: Annotated[
        bool,
        typer.Option(
            "--incremental-upgrade",
            help="a rayservice moves traffic to a new Ray cluster in steps, through a Gateway of "
            "--gateway-class that KubeRay creates",
        ),
    ] = False,
    image: Image = None,
    namespace: Namespace = None,
    storage_class: StorageClass = None,
    claims: PrintClaims = True,
    allow_import: AllowImport = None,
) -> None:
    """Print the manifests of a server for a bundle.

    The bundle is checked as `kway serve` checks it.
    """
    from launch.kubernetes.kustomize import Settings, kustomize_command
    from launch.kubernetes.serving import Server, check_options, render_server

    kustomize_command()
    allowed = tuple(allow_import or ())
    least, most = replica_range(replicas)
    server = Server(
        bundle,
        kind,
        replicas=(least, most or least),
        device=device,
        cpus=cpus,
        memory=memory,
        is_in_image=in_image,
        requires_tokens=not no_tokens,
        token_file=token_file,
        has_grpc=grpc,
        has_incremental_upgrade=incremental_upgrade,
        has_surge=surge,
        allow_imports=allowed,
        host=host,
        gateway_class=gateway_class,
        tls_secret=tls_secret,
        has_limits=edge_limits,
    )
    check_options(server)
    if token_file is not None:
        check_tokens(token_file)
    _check_bundle(bundle, device, allowed)
    settings = Settings(image, namespace, storage_class, has_claims=claims)
    typer.echo(render_server(server, settings), nl=False)


def _check_bundle(bundle: Path, device: Literal["cpu", "cuda"], allowed: tuple[str, ...]) -> None:
    from serving.model import check_imports
    from trainer.backbone.precision import check_device
    from trainer.bundle.bundle import Bundle

    with Bundle.open(bundle) as opened:
        check_device(opened.spec.precision, device, on_this_machine=False)
        check_imports(opened, device, allowed)
        opened.verify(class_weights=False)
