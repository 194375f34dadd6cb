// The scale of the score lines. Lines that are shown together share one scale: its ends are set on
// their container and the values on each line; the style sheet computes the positions.

const MARGIN = 0.06;

// Set and return the ends, so that all scores and thresholds of `verdicts` fit.
export function setScale(container, verdicts) {
  let [low, high] = [Infinity, -Infinity];
  for (const { score, threshold } of verdicts) {
    low = Math.min(low, score, threshold ?? score);
    high = Math.max(high, score, threshold ?? score);
  }
  if (low > high) return null;
  const margin = MARGIN * (high - low) || 1;
  container.style.setProperty("--low", low - margin);
  container.style.setProperty("--high", high + margin);
  return [low, high];
}
