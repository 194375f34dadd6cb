// Formats numbers and counts. Decimals use plain digits and a point, like the API and the CLI.

export function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

// Both with enough digits to distinguish them: 1.4996 is not shown as 1.50 next to 1.50.
export function apart(score, threshold) {
  for (let digits = 2; digits < 7; digits += 1) {
    const shown = [score.toFixed(digits), threshold.toFixed(digits)];
    if (shown[0] !== shown[1] || score === threshold) return shown;
  }
  return [String(score), String(threshold)];
}

export function percent(share) {
  return `${Number((100 * share).toPrecision(6))} %`;
}

export function bytes(number) {
  return number < 2 ** 20 ? `${Math.ceil(number / 1024)} KiB` : `${(number / 2 ** 20).toFixed(1)} MiB`;
}
