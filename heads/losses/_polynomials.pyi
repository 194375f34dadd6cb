def forward(
    leaders: object,
    power_sums: object,
    values: object,
    num_rows: int,
    k: int,
    num_powers: int,
    scale: float,
    /,
) -> None: ...
def backward(
    leaders: object,
    power_sums: object,
    grads: object,
    by_leaders: object,
    by_power_sums: object,
    num_rows: int,
    k: int,
    num_powers: int,
    scale: float,
    /,
) -> None: ...
