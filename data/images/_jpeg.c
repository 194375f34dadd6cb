/* Decodes a rectangle of a baseline JPEG with libjpeg-turbo.
 *
 * A full decode takes more than half of a loader's CPU time, but a random crop needs only some of
 * the rows and columns. libjpeg-turbo can skip the color conversion, upsampling and inverse DCT of
 * the others, and the rows below the rectangle are not read at all.
 *
 * The library is not linked. `connect` looks up its functions in the libjpeg-turbo that Pillow
 * uses, so building this module requires only a C compiler and Python's headers.
 * jpeg_CreateDecompress reports an error if the size of its structures differs from the one in
 * libjpeg/jpeglib.h.
 *
 * `decode` returns -1 for other kinds of JPEG and for damaged data. The caller then decodes the
 * whole image with OpenCV, which determines whether the image is valid.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <setjmp.h>
#include <stdio.h>

#include "libjpeg/jpeglib.h"

static struct {
    struct jpeg_error_mgr *(*std_error)(struct jpeg_error_mgr *);
    void (*create)(j_decompress_ptr, int, size_t);
    void (*destroy)(j_decompress_ptr);
    void (*memory_source)(j_decompress_ptr, const unsigned char *, unsigned long);
    int (*read_header)(j_decompress_ptr, boolean);
    boolean (*start)(j_decompress_ptr);
    void (*crop)(j_decompress_ptr, JDIMENSION *, JDIMENSION *);
    JDIMENSION (*skip)(j_decompress_ptr, JDIMENSION);
    JDIMENSION (*read)(j_decompress_ptr, JSAMPARRAY, JDIMENSION);
} jpeg;

/* libjpeg calls on_error for a fatal error. It jumps back to the setjmp of our function. */
typedef struct {
    struct jpeg_error_mgr base;
    jmp_buf failed;
} Errors;

static void on_error(j_common_ptr decoder) {
    longjmp(((Errors *)decoder->err)->failed, 1);
}

/* Count warnings, but do not print them. */
static void on_message(j_common_ptr decoder, int level) {
    if (level < 0) decoder->err->num_warnings++;
}

static struct jpeg_error_mgr *handlers(Errors *errors) {
    jpeg.std_error(&errors->base);
    errors->base.error_exit = on_error;
    errors->base.emit_message = on_message;
    return &errors->base;
}

PyDoc_STRVAR(connect_doc,
             "connect(path: str) -> bool\n\n"
             "Use the libjpeg-turbo to which the shared library `path` is linked. Return whether\n"
             "it has the expected functions and structures.");

static PyObject *connect(PyObject *module, PyObject *args) {
    const char *path;
    if (!PyArg_ParseTuple(args, "s", &path)) return NULL;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) Py_RETURN_FALSE;
    struct {
        const char *name;
        void **function;
    } wanted[] = {
        {"jpeg_std_error", (void **)&jpeg.std_error},
        {"jpeg_CreateDecompress", (void **)&jpeg.create},
        {"jpeg_destroy_decompress", (void **)&jpeg.destroy},
        {"jpeg_mem_src", (void **)&jpeg.memory_source},
        {"jpeg_read_header", (void **)&jpeg.read_header},
        {"jpeg_start_decompress", (void **)&jpeg.start},
        {"jpeg_crop_scanline", (void **)&jpeg.crop},
        {"jpeg_skip_scanlines", (void **)&jpeg.skip},
        {"jpeg_read_scanlines", (void **)&jpeg.read},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        *wanted[i].function = dlsym(library, wanted[i].name);
        if (*wanted[i].function == NULL) Py_RETURN_FALSE;
    }
    struct jpeg_decompress_struct decoder;
    Errors errors;
    decoder.err = handlers(&errors);
    if (setjmp(errors.failed)) Py_RETURN_FALSE; /* the structures have another size */
    jpeg.create(&decoder, JPEG_LIB_VERSION, sizeof decoder);
    jpeg.destroy(&decoder);
    Py_RETURN_TRUE;
}

typedef struct {
    int image_height, image_width;  /* as in the header */
    int top, left, height, width;   /* in pixels of the scaled image */
    int denominator, channels;
} Request;

/* Fancy upsampling interpolates between neighboring chroma samples, so the pixels at the edge of a
 * rectangle depend on the next pixel outside it. Rows of only one or two chroma samples are
 * upsampled differently, hence MIN_WIDTH. jpeg_crop_scanline moves the left edge to the beginning
 * of a block, which has up to 32 columns. */
enum { MARGIN = 1, MIN_WIDTH = 16, EXTRA_COLUMNS = 2 * MARGIN + MIN_WIDTH + 31 };

static int is_supported(j_decompress_ptr decoder, const Request *want) {
    return (int)decoder->image_height == want->image_height &&
           (int)decoder->image_width == want->image_width && decoder->data_precision == 8 &&
           !decoder->progressive_mode && !decoder->arith_code &&
           decoder->comps_in_scan == decoder->num_components &&
           (decoder->jpeg_color_space == JCS_YCbCr || decoder->jpeg_color_space == JCS_GRAYSCALE);
}

/* Read the rows of the rectangle into `pixels`, with `stride` bytes per row. Return the number of
 * columns before the rectangle, or -1. */
static int read_rectangle(j_decompress_ptr decoder, const Request *want, unsigned char *pixels,
                          size_t stride) {
    JDIMENSION top = want->top, bottom = top + want->height;
    JDIMENSION left = want->left > MARGIN ? want->left - MARGIN : 0;
    JDIMENSION right = want->left + want->width;
    if (bottom > decoder->output_height || right > decoder->output_width) return -1;
    right += MARGIN;
    if (right < left + MIN_WIDTH) right = left + MIN_WIDTH;
    if (right > decoder->output_width) right = decoder->output_width;
    if (left + MIN_WIDTH > right) left = right > MIN_WIDTH ? right - MIN_WIDTH : 0;
    JDIMENSION width = right - left;
    if (width < decoder->output_width) jpeg.crop(decoder, &left, &width);
    if ((size_t)width * want->channels > stride) return -1;
    if (top > 0) jpeg.skip(decoder, top);
    while (decoder->output_scanline < bottom) {
        JSAMPROW row = pixels + (decoder->output_scanline - top) * stride;
        if (jpeg.read(decoder, &row, 1) != 1) return -1;
    }
    return decoder->err->num_warnings ? -1 : want->left - (int)left;
}

static int decode_rectangle(const Py_buffer *data, const Request *want, const Py_buffer *pixels) {
    struct jpeg_decompress_struct decoder;
    Errors errors;
    volatile int columns = -1;
    decoder.err = handlers(&errors);
    if (setjmp(errors.failed)) {
        jpeg.destroy(&decoder);
        return -1;
    }
    jpeg.create(&decoder, JPEG_LIB_VERSION, sizeof decoder);
    jpeg.memory_source(&decoder, data->buf, data->len);
    jpeg.read_header(&decoder, TRUE);
    if (is_supported(&decoder, want)) {
        decoder.out_color_space = want->channels == 1 ? JCS_GRAYSCALE : JCS_RGB;
        decoder.scale_num = 1;
        decoder.scale_denom = want->denominator;
        jpeg.start(&decoder);
        columns = read_rectangle(&decoder, want, pixels->buf, pixels->len / want->height);
    }
    jpeg.destroy(&decoder);
    return columns;
}

PyDoc_STRVAR(decode_doc,
             "decode(data, pixels, image_height, image_width, top, left, height, width,\n"
             "       denominator, channels, /) -> int\n\n"
             "Decode a rectangle of an image that is scaled down by `denominator` (1, 2, 4 or 8).\n"
             "Return the number of columns of `pixels` before the rectangle, or -1 if the image is\n"
             "damaged or of another kind.\n\n"
             "pixels: uint8 [height, width + EXTRA_COLUMNS, channels]; it is overwritten.");

static PyObject *decode(PyObject *module, PyObject *args) {
    Py_buffer data, pixels;
    Request want;
    if (!PyArg_ParseTuple(args, "y*w*iiiiiiii", &data, &pixels, &want.image_height,
                          &want.image_width, &want.top, &want.left, &want.height, &want.width,
                          &want.denominator, &want.channels))
        return NULL;
    int columns = -1;
    if (jpeg.read == NULL || want.top < 0 || want.left < 0 || want.height <= 0 ||
        want.width <= 0 || (want.channels != 1 && want.channels != 3)) {
        PyErr_SetString(PyExc_ValueError, "invalid rectangle, or connect was not called");
    } else {
        Py_BEGIN_ALLOW_THREADS
        columns = decode_rectangle(&data, &want, &pixels);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&pixels);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(columns);
}

static PyMethodDef methods[] = {
    {"connect", connect, METH_VARARGS, connect_doc},
    {"decode", decode, METH_VARARGS, decode_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_jpeg",
    .m_doc = "Decodes a rectangle of a baseline JPEG with libjpeg-turbo.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__jpeg(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "EXTRA_COLUMNS", EXTRA_COLUMNS) < 0)
        Py_CLEAR(module);
    return module;
}
