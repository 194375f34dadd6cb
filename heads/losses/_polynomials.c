/* Elementary symmetric polynomials of each row's statistics, and their gradient, in float64.
 *
 * This is the computation of log_polynomials.py for CPUs. For a few hundred rows, torch takes most
 * of the time to dispatch its small operations. Here, each vector contains LANES rows, so the
 * arithmetic is vectorized for every k. A row's result does not depend on the other rows.
 *
 * The leaders' factors are multiplied one after the other. The gradient with respect to a factor
 * needs the product of those before it, so `backward` keeps all of these products. No step divides
 * by a factor, because that would be inaccurate.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>

/* The size of the vector registers of every x86-64 and 64-bit ARM CPU. Wider vectors are slower
 * where the compiler has to split them. */
enum { LANES = 2 };
typedef double Lanes __attribute__((vector_size(LANES * sizeof(double))));

/* A product of 2k factors 1 + t has coefficients up to (2k)! / k!^2, which is finite up to here. */
enum { MAX_K = 500 };

/* The arguments of both functions. The arrays are C-contiguous and contain float64. */
enum { LEADERS, SUMS, VALUES, BY_LEADERS, BY_SUMS, MAX_ARRAYS };

typedef struct {
    Py_buffer arrays[MAX_ARRAYS]; /* [B, m], [B, p], [2, B], [B, m], [B, p] */
    Py_ssize_t num_rows, k, m, p;
    double scale;
} Arguments;

/* The computation for rows start, .., start + LANES - 1. */
typedef struct {
    Lanes *lower, *upper; /* [m] the factor of a leader is lower + upper t */
    Lanes *units, *terms; /* [p] (-1)^(r-1) (e_m / U)^r, and the power sums times these */
    Lanes *others;        /* [k + 1] the product of the other scores' factors */
    Lanes *gradient;      /* [k + 2] of a product; the last element is 0 */
    Lanes *products;      /* [m + 1, k + 1] of the factors of the first 0, .., m leaders */
    Lanes both[2];        /* sigma_k and sigma_(k-1), in units of U and of the factors */
    Lanes divided[2];     /* the logs of their largest products in these units */
    Lanes by_both[2];     /* the gradient of `both` */
} Block;

static Lanes *allocate(Block *block, const Arguments *args) {
    Py_ssize_t k = args->k, m = args->m, p = args->p;
    Py_ssize_t size = 2 * m + 2 * p + (k + 1) + (k + 2) + (m + 1) * (k + 1);
    Lanes *memory = PyMem_Calloc(size, sizeof(Lanes));
    block->lower = memory;
    block->upper = block->lower + m;
    block->units = block->upper + m;
    block->terms = block->units + p;
    block->others = block->terms + p;
    block->gradient = block->others + k + 1;
    block->products = block->gradient + k + 2;
    return memory;
}

static double *row_of(const Arguments *args, int array, Py_ssize_t row, Py_ssize_t width) {
    return (double *)args->arrays[array].buf + row * width;
}

/* The comparisons are false for NaN, which is kept. */
static void load_row(Block *block, const Arguments *args, Py_ssize_t row, int lane) {
    Py_ssize_t k = args->k, m = args->m, p = args->p;
    const double *leaders = row_of(args, LEADERS, row, m), *sums = row_of(args, SUMS, row, p);
    double kth = leaders[k - 1] == -INFINITY ? 0 : leaders[k - 1];
    double mean = sums[0] / k < 1 ? 1 : sums[0] / k;
    double log_mean = (leaders[m - 1] - kth) * args->scale + log(mean);
    double log_unit = log_mean < 0 ? 0 : log_mean;
    double ratio = exp(log_mean - log_unit) / mean, unit = -1, divided = 0;
    for (Py_ssize_t r = 0; r < p; r++) {
        unit *= -ratio;
        block->units[r][lane] = unit;
        block->terms[r][lane] = unit * sums[r];
    }
    for (Py_ssize_t j = 0; j < m; j++) {
        double log_term = (leaders[j] - kth) * args->scale - log_unit;
        double smaller = exp(-fabs(log_term));
        block->lower[j][lane] = log_term > 0 ? smaller : 1;
        block->upper[j][lane] = log_term > 0 ? 1 : smaller;
        if (j == k - 1) block->divided[1][lane] = divided;
        if (j < k) divided += log_term > 0 ? 0 : log_term;
    }
    block->divided[0][lane] = divided;
}

/* Newton's identities: i sigma_i = sum over r of (-1)^(r-1) sigma_(i-r) p_r. */
static void newton(Block *block, const Arguments *args) {
    Lanes *sigma = block->others;
    sigma[0] = (Lanes){0} + 1;
    for (Py_ssize_t i = 1; i <= args->k; i++) {
        Lanes sum = {0};
        for (Py_ssize_t r = 1; r <= Py_MIN(i, args->p); r++)
            sum += block->terms[r - 1] * sigma[i - r];
        sigma[i] = sum / (double)i;
    }
}

/* Multiply the leaders' factors, up to t^k. If `step` is 0, each product overwrites the previous
 * one. Coefficients above a product's degree are 0 from the allocation. */
static Lanes *multiply_leaders(Block *block, const Arguments *args, Py_ssize_t step) {
    Lanes *product = block->products;
    memset(product, 0, (args->k + 1) * sizeof(Lanes));
    product[0] += 1;
    for (Py_ssize_t j = 0; j < args->m; j++, product += step) {
        Lanes lower = block->lower[j], upper = block->upper[j];
        for (Py_ssize_t i = Py_MIN(j + 1, args->k); i > 0; i--)
            product[step + i] = lower * product[i] + upper * product[i - 1];
        product[step] = lower * product[0];
    }
    return product;
}

static Lanes *compute_both(Block *block, const Arguments *args, Py_ssize_t start,
                           Py_ssize_t step) {
    for (int lane = 0; lane < LANES; lane++) /* missing rows repeat the last one */
        load_row(block, args, Py_MIN(start + lane, args->num_rows - 1), lane);
    newton(block, args);
    Lanes *product = multiply_leaders(block, args, step);
    for (int less = 0; less < 2; less++) {
        Lanes sum = {0};
        for (Py_ssize_t i = 0; i <= args->k - less; i++)
            sum += product[i] * block->others[args->k - less - i];
        block->both[less] = sum;
    }
    return product;
}

static void forward_block(Block *block, const Arguments *args, Py_ssize_t start) {
    compute_both(block, args, start, 0);
    for (int less = 0; less < 2; less++) {
        double *values = row_of(args, VALUES, less, args->num_rows);
        for (int lane = 0; lane < LANES && start + lane < args->num_rows; lane++)
            values[start + lane] = log(block->both[less][lane]) - block->divided[less][lane];
    }
}

/* Write the gradient of the polynomial whose product with `other` contains `both`. */
static void differentiate(Block *block, const Lanes *other, Py_ssize_t k) {
    const Lanes *by_both = block->by_both;
    for (Py_ssize_t i = 0; i < k; i++)
        block->gradient[i] = by_both[0] * other[k - i] + by_both[1] * other[k - 1 - i];
    block->gradient[k] = by_both[0] * other[0];
}

static void backward_block(Block *block, const Arguments *args, Py_ssize_t start) {
    Py_ssize_t k = args->k, m = args->m, p = args->p;
    const Lanes *last = compute_both(block, args, start, k + 1), *product = last;
    Lanes *gradient = block->gradient;
    for (int less = 0; less < 2; less++) {
        const double *grads = row_of(args, VALUES, less, args->num_rows);
        for (int lane = 0; lane < LANES; lane++) {
            double sigma = block->both[less][lane];
            double grad = grads[Py_MIN(start + lane, args->num_rows - 1)];
            block->by_both[less][lane] = sigma != 0 ? grad / sigma : 0;
        }
    }
    differentiate(block, block->others, k);
    for (Py_ssize_t j = m - 1; j >= 0; j--) {
        product -= k + 1;
        Lanes lower = block->lower[j], upper = block->upper[j], sum = {0};
        for (Py_ssize_t i = 0; i <= Py_MIN(j, k); i++) {
            sum += product[i] * gradient[i + 1];
            gradient[i] = lower * gradient[i] + upper * gradient[i + 1];
        }
        sum *= upper * args->scale;
        for (int lane = 0; lane < LANES && start + lane < args->num_rows; lane++)
            row_of(args, BY_LEADERS, start + lane, m)[j] = sum[lane];
    }
    differentiate(block, last, k);
    for (Py_ssize_t r = 1; r <= p; r++) { /* d sigma_i / d p_r is (-1)^(r-1) sigma_(i-r) / r */
        Lanes sum = {0};
        for (Py_ssize_t i = r; i <= k; i++) sum += gradient[i] * block->others[i - r];
        sum *= block->units[r - 1] / (double)r;
        for (int lane = 0; lane < LANES && start + lane < args->num_rows; lane++)
            row_of(args, BY_SUMS, start + lane, p)[r - 1] = sum[lane];
    }
}

static int has_valid_sizes(Arguments *args, int num_arrays) {
    if (args->k < 1 || args->k > MAX_K || args->p < 1 || args->p > args->k) return 0;
    args->m = 2 * args->k;
    const Py_ssize_t widths[] = {args->m, args->p, 2, args->m, args->p};
    for (int i = 0; i < num_arrays; i++) {
        Py_ssize_t row = widths[i] * (Py_ssize_t)sizeof(double), size = args->arrays[i].len;
        if (size % row != 0 || size / row != args->num_rows) return 0;
    }
    return 1;
}

/* Compute all rows, and release the arrays. */
static PyObject *compute(Arguments *args, int num_arrays,
                         void (*compute_block)(Block *, const Arguments *, Py_ssize_t)) {
    Block block;
    if (!has_valid_sizes(args, num_arrays)) {
        PyErr_SetString(PyExc_ValueError, "the sizes of the arrays do not match B, k and p");
    } else {
        Lanes *memory = allocate(&block, args);
        if (memory == NULL) {
            PyErr_NoMemory();
        } else {
            Py_BEGIN_ALLOW_THREADS
            for (Py_ssize_t start = 0; start < args->num_rows; start += LANES)
                compute_block(&block, args, start);
            Py_END_ALLOW_THREADS
        }
        PyMem_Free(memory);
    }
    for (int i = 0; i < num_arrays; i++) PyBuffer_Release(&args->arrays[i]);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(forward_doc,
             "forward(leaders, power_sums, values, num_rows, k, num_powers, scale, /)\n\n"
             "Write the values of `log_polynomials`, first those of sigma_k, to `values`.\n\n"
             "All arrays are contiguous and contain float64: [B, 2k], [B, p] and [2, B].");

static PyObject *forward(PyObject *module, PyObject *args) {
    Arguments parsed;
    Py_buffer *arrays = parsed.arrays;
    if (!PyArg_ParseTuple(args, "y*y*w*nnnd", &arrays[LEADERS], &arrays[SUMS], &arrays[VALUES],
                          &parsed.num_rows, &parsed.k, &parsed.p, &parsed.scale))
        return NULL;
    return compute(&parsed, BY_LEADERS, forward_block);
}

PyDoc_STRVAR(backward_doc,
             "backward(leaders, power_sums, grads, by_leaders, by_power_sums,\n"
             "         num_rows, k, num_powers, scale, /)\n\n"
             "Convert `grads` [2, B], the gradient of the values of `forward`, to that of the\n"
             "leaders and power sums, which is written to `by_leaders` and `by_power_sums`.");

static PyObject *backward(PyObject *module, PyObject *args) {
    Arguments parsed;
    Py_buffer *arrays = parsed.arrays;
    if (!PyArg_ParseTuple(args, "y*y*y*w*w*nnnd", &arrays[LEADERS], &arrays[SUMS],
                          &arrays[VALUES], &arrays[BY_LEADERS], &arrays[BY_SUMS],
                          &parsed.num_rows, &parsed.k, &parsed.p, &parsed.scale))
        return NULL;
    return compute(&parsed, MAX_ARRAYS, backward_block);
}

static PyMethodDef methods[] = {
    {"forward", forward, METH_VARARGS, forward_doc},
    {"backward", backward, METH_VARARGS, backward_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_polynomials",
    .m_doc = "Elementary symmetric polynomials of each row's statistics, and their gradient.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__polynomials(void) {
    return PyModule_Create(&definition);
}
