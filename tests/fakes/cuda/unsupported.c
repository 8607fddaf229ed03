/* Entries that pycuda links against and nobody here calls: they answer CUDA_ERROR_NOT_SUPPORTED. */
#include "fake.h"

#define UNSUPPORTED(name) API CUresult name(void); API CUresult name(void) { return NOT_SUPPORTED; }

#include "unsupported.inc"
