// Positions of scores on a line, with one scale for everything that is shown together. The ends are
// set on the container and the values on each line; the style sheet computes the positions.

const MARGIN = 0.06;

// Set and return the ends, such that all scores and thresholds of `verdicts` fit.
export function setScale(holder, verdicts) {
  let [low, high] = [Infinity, -Infinity];
  for (const { score, threshold } of verdicts) {
    low = Math.min(low, score, threshold ?? score);
    high = Math.max(high, score, threshold ?? score);
  }
  if (low > high) return null;
  const room = MARGIN * (high - low) || 1;
  holder.style.setProperty("--low", low - room);
  holder.style.setProperty("--high", high + room);
  return [low, high];
}
