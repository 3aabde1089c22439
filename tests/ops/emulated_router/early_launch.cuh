// Stands in for csrc/early_launch.cuh, of which common.cuh has what is used.

#pragma once

#include "common.cuh"
