/* Decodes a random crop of a JPEG, as a user would write it with libjpeg-turbo: the header is parsed
 * once, the box is drawn here, and jpeg_crop_scanline and jpeg_skip_scanlines decode only the box.
 * The data are not checked. `benchmarks/data_peers.py` compiles this file.
 */
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

#include <jpeglib.h>

struct errors {
    struct jpeg_error_mgr base;
    jmp_buf failed;
};

static void on_error(j_common_ptr decoder) {
    longjmp(((struct errors *)decoder->err)->failed, 1);
}

static void on_message(j_common_ptr decoder, int level) {}

static double uniform(unsigned short *state, double low, double high) {
    return low + (high - low) * erand48(state);
}

/* Draw top, left, height and width, as torchvision's RandomResizedCrop does. */
static void draw_box(unsigned short *state, int height, int width, int *box) {
    for (int attempt = 0; attempt < 10; attempt++) {
        double area = height * (double)width * uniform(state, 0.08, 1.0);
        double ratio = exp(uniform(state, log(3.0 / 4), log(4.0 / 3)));
        box[2] = (int)lround(sqrt(area / ratio));
        box[3] = (int)lround(sqrt(area * ratio));
        if (0 < box[3] && box[3] <= width && 0 < box[2] && box[2] <= height) {
            box[0] = (int)uniform(state, 0, height - box[2] + 1);
            box[1] = (int)uniform(state, 0, width - box[3] + 1);
            return;
        }
    }
    box[2] = box[3] = height < width ? height : width;
    box[0] = (height - box[2]) / 2;
    box[1] = (width - box[3]) / 2;
}

/* Write the RGB rows of a random box to `pixels`, which has room for `capacity` bytes. `state`: of
 * the generator. Return 0, and in `found` the height and the width of the box, the number of columns
 * in a row, and those before the box, because libjpeg-turbo begins at a block. Return -1 for a
 * broken image or a box that is too large. */
int decode_crop(const unsigned char *data, unsigned long size, unsigned short *state,
                unsigned char *pixels, unsigned long capacity, int *found) {
    struct jpeg_decompress_struct decoder;
    struct errors errors;
    decoder.err = jpeg_std_error(&errors.base);
    errors.base.error_exit = on_error;
    errors.base.emit_message = on_message;
    jpeg_create_decompress(&decoder);
    if (setjmp(errors.failed)) {
        jpeg_destroy_decompress(&decoder);
        return -1;
    }
    jpeg_mem_src(&decoder, data, size);
    jpeg_read_header(&decoder, TRUE);
    decoder.out_color_space = JCS_RGB;
    decoder.dct_method = JDCT_IFAST;
    decoder.do_fancy_upsampling = FALSE;
    int box[4];
    draw_box(state, decoder.image_height, decoder.image_width, box);
    jpeg_start_decompress(&decoder);
    JDIMENSION first = box[1], columns = box[3];
    jpeg_crop_scanline(&decoder, &first, &columns);
    jpeg_skip_scanlines(&decoder, box[0]);
    if (3UL * columns * box[2] > capacity)
        longjmp(errors.failed, 1);
    for (int row = 0; row < box[2]; row++) {
        JSAMPROW at = pixels + 3UL * columns * row;
        jpeg_read_scanlines(&decoder, &at, 1);
    }
    jpeg_destroy_decompress(&decoder);
    found[0] = box[2];
    found[1] = box[3];
    found[2] = (int)columns;
    found[3] = box[1] - (int)first;
    return 0;
}
