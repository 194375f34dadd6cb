// Where scores stand on a line: one scale for all that is shown together.
// The ends are set on what holds the lines, each line has its numbers, and the style sheet divides.

const MARGIN = 0.06;

// Set the ends, so that all scores and thresholds of `verdicts` have room; the ends are returned.
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
