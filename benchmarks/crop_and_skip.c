/* Decodes a rectangle of a JPEG, as a user would write it with libjpeg-turbo: jpeg_crop_scanline and
 * jpeg_skip_scanlines, without checks of the data. `benchmarks/data_image_peers.py` compiles it.
 */
#include <setjmp.h>
#include <stdio.h>

#include <jpeglib.h>

struct errors {
    struct jpeg_error_mgr base;
    jmp_buf failed;
};

static void on_error(j_common_ptr decoder) {
    longjmp(((struct errors *)decoder->err)->failed, 1);
}

static void on_message(j_common_ptr decoder, int level) {}

static void start(struct jpeg_decompress_struct *decoder, struct errors *errors,
                  const unsigned char *data, unsigned long size) {
    decoder->err = jpeg_std_error(&errors->base);
    errors->base.error_exit = on_error;
    errors->base.emit_message = on_message;
    jpeg_create_decompress(decoder);
    jpeg_mem_src(decoder, data, size);
    jpeg_read_header(decoder, TRUE);
}

/* Return 0 and the size of the image, or -1. */
int image_size(const unsigned char *data, unsigned long size, int *height, int *width) {
    struct jpeg_decompress_struct decoder;
    struct errors errors;
    int failed = setjmp(errors.failed);
    if (!failed) {
        start(&decoder, &errors, data, size);
        *height = decoder.image_height;
        *width = decoder.image_width;
    }
    jpeg_destroy_decompress(&decoder);
    return failed ? -1 : 0;
}

/* Write RGB rows of `stride` bytes to `pixels`. Return the number of columns before `left`, because
 * libjpeg-turbo begins at a block, or -1. fast: use the fast DCT and the fast upsampling. */
int decode_box(const unsigned char *data, unsigned long size, int top, int left, int height,
               int width, int fast, unsigned char *pixels, long stride) {
    struct jpeg_decompress_struct decoder;
    struct errors errors;
    if (setjmp(errors.failed)) {
        jpeg_destroy_decompress(&decoder);
        return -1;
    }
    start(&decoder, &errors, data, size);
    decoder.out_color_space = JCS_RGB;
    decoder.dct_method = fast ? JDCT_IFAST : JDCT_ISLOW;
    decoder.do_fancy_upsampling = !fast;
    jpeg_start_decompress(&decoder);
    JDIMENSION first = left, columns = width;
    jpeg_crop_scanline(&decoder, &first, &columns);
    jpeg_skip_scanlines(&decoder, top);
    for (int row = 0; row < height; row++) {
        JSAMPROW at = pixels + row * stride;
        jpeg_read_scanlines(&decoder, &at, 1);
    }
    jpeg_destroy_decompress(&decoder);
    return left - (int)first;
}
