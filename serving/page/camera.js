// Frames from the browser's camera: one JPEG per second, in the camera's resolution.

const MILLISECONDS_A_FRAME = 1000;
const QUALITY = 0.9;

export class Camera {
  #stream;
  #timer;
  #video;

  // Show the camera in `video` and call `take` with frames while `isReady`. Throws an Error with a
  // readable message if there is no camera or access is denied.
  async start(video, isReady, take) {
    if (!navigator.mediaDevices?.getUserMedia) {
      throw new Error("browsers give a page the camera over HTTPS or on this very machine only: drop images instead");
    }
    try {
      this.#stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    } catch (error) {
      throw new Error(WORDS[error.name] ?? `the camera does not start (${error.message})`);
    }
    this.#video = video;
    video.srcObject = this.#stream;
    await video.play();
    this.#timer = setInterval(() => isReady() && this.#frame(take), MILLISECONDS_A_FRAME);
  }

  stop() {
    clearInterval(this.#timer);
    for (const track of this.#stream?.getTracks() ?? []) track.stop();
    if (this.#video) this.#video.srcObject = null;
  }

  #frame(take) {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [this.#video.videoWidth, this.#video.videoHeight];
    if (!canvas.width) return;
    canvas.getContext("2d").drawImage(this.#video, 0, 0);
    canvas.toBlob((blob) => blob && take(blob), "image/jpeg", QUALITY);
  }
}

const WORDS = {
  NotAllowedError: "this page may not use the camera: allow it in the browser, or drop images instead",
  NotFoundError: "this machine has no camera: drop images instead",
  NotReadableError: "another program holds the camera: close it, or drop images instead",
};
