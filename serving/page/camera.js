// Frames from the browser's camera: one JPEG per second, at the camera's resolution.

const MILLISECONDS_PER_FRAME = 1000;
const QUALITY = 0.9;

export class Camera {
  #stream;
  #timer;
  #video;

  // Show the camera in `video` and call `onFrame` with frames while `isReady`. Throws an Error with a
  // readable message if there is no camera or access is denied.
  async start(video, isReady, onFrame) {
    if (!navigator.mediaDevices?.getUserMedia) {
      throw new Error("browsers allow camera access only over HTTPS or on localhost: drop images instead");
    }
    try {
      this.#stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    } catch (error) {
      throw new Error(MESSAGES[error.name] ?? `the camera failed to start (${error.message})`);
    }
    this.#video = video;
    video.srcObject = this.#stream;
    await video.play();
    this.#timer = setInterval(() => isReady() && this.#capture(onFrame), MILLISECONDS_PER_FRAME);
  }

  stop() {
    clearInterval(this.#timer);
    for (const track of this.#stream?.getTracks() ?? []) track.stop();
    if (this.#video) this.#video.srcObject = null;
  }

  #capture(onFrame) {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [this.#video.videoWidth, this.#video.videoHeight];
    if (!canvas.width) return;
    canvas.getContext("2d").drawImage(this.#video, 0, 0);
    canvas.toBlob((blob) => blob && onFrame(blob), "image/jpeg", QUALITY);
  }
}

const MESSAGES = {
  NotAllowedError: "camera access was denied: allow it in the browser, or drop images instead",
  NotFoundError: "no camera was found: drop images instead",
  NotReadableError: "another program is using the camera: close it, or drop images instead",
};
