// The scale of the score lines. Lines that are shown together share one scale. Its ends are set on
// their container, and the values are set on each line. The style sheet computes the positions.

const MARGIN = 0.06;

// Set the ends so that all scores and thresholds in `verdicts` fit, and return them.
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
