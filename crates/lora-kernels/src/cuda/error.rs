use std::fmt;

/// Why CUDA cannot be used or refused a call. Every message names the host backend where it is the way out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no NVIDIA driver library on this machine.
    #[error(
        "CUDA: the NVIDIA driver library (libcuda) is not on this machine; install the driver, or use the host backend"
    )]
    NoDriver,
    /// The driver is there and the device is not.
    #[error(
        "CUDA: device {ordinal} does not exist, the driver shows {count}; use the host backend"
    )]
    NoDevice {
        /// Device asked for.
        ordinal: u32,
        /// Devices there are.
        count: u32,
    },
    /// No embedded PTX can run on the device.
    #[error(
        "CUDA: no kernels for compute capability {major}.{minor}; built in are {}; build PTX for it with \
         `cargo xtask build-kernels`, or use the host backend", Listed(.supported)
    )]
    UnsupportedArchitecture {
        /// Compute capability, major.
        major: u32,
        /// Compute capability, minor.
        minor: u32,
        /// Architectures that have PTX here.
        supported: Vec<&'static str>,
    },
    /// A kernel that a module should hold is not in it: the PTX and this crate are of different builds.
    #[error(
        "CUDA: kernel {kernel} is missing from the module built for {target}; run `cargo xtask build-kernels`"
    )]
    MissingKernel {
        /// Symbol.
        kernel: &'static str,
        /// Target of the PTX.
        target: &'static str,
    },
    /// A launch wants more shared memory than a block of this device may use.
    #[error(
        "CUDA: {kernel} needs {needed} bytes of shared memory a block, the device gives {limit}"
    )]
    SharedMemory {
        /// Symbol.
        kernel: &'static str,
        /// Bytes needed.
        needed: u32,
        /// Bytes a block may use.
        limit: u32,
    },
    /// A driver call failed.
    #[error("CUDA: {operation} failed: {detail}")]
    Driver {
        /// What was asked.
        operation: &'static str,
        /// The driver's own words.
        detail: String,
    },
}

struct Listed<'a>(&'a [&'static str]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(", "))
    }
}
