//! Driver calls as functions that return results: the layer right above the raw bindings.
//!
//! Every function but [`device_count`] and [`Device::open`] expects the context of its handles to be current.

use super::CudaError;
use cudarc::driver::{DriverError, result, sys};
use std::ffi::{CString, c_void};

pub(super) trait Named<T> {
    /// Says which operation failed.
    fn named(self, operation: &'static str) -> Result<T, CudaError>;
}

impl<T> Named<T> for Result<T, DriverError> {
    fn named(self, operation: &'static str) -> Result<T, CudaError> {
        self.map_err(|error| CudaError::Driver {
            operation,
            detail: format!("{error:?}"),
        })
    }
}

/// Loads the driver library. Everything else here may be called only after this has succeeded.
pub(super) fn init() -> Result<(), CudaError> {
    // SAFETY: opening libcuda runs its initialisers, which is what every CUDA program does.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    result::init().named("initialising the driver")
}

/// What is asked of a device once.
#[derive(Debug, Clone)]
pub(super) struct Device {
    pub(super) handle: sys::CUdevice,
    pub(super) name: String,
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) multiprocessors: u32,
    pub(super) shared_bytes: u32,
    pub(super) multiprocessor_shared_bytes: u32,
    pub(super) l2_bytes: u64,
    /// Whether it has stream-ordered allocations.
    pub(super) memory_pools: bool,
}

impl Device {
    pub(super) fn open(ordinal: u32) -> Result<Self, CudaError> {
        init()?;
        let count = result::device::get_count().named("counting devices")? as u32;
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        Self::describe(result::device::get(ordinal as i32).named("opening the device")?)
    }

    /// The device of the current context.
    pub(super) fn current() -> Result<Self, CudaError> {
        let mut handle: sys::CUdevice = 0;
        // SAFETY: `handle` is writable; without a current context the driver returns an error.
        unsafe { sys::cuCtxGetDevice(&mut handle) }
            .result()
            .named("asking for the context's device")?;
        Self::describe(handle)
    }

    fn describe(handle: sys::CUdevice) -> Result<Self, CudaError> {
        use sys::CUdevice_attribute as Attribute;
        let attribute = |which| {
            // SAFETY: `handle` came from the driver.
            unsafe { result::device::get_attribute(handle, which) }
                .named("reading a device attribute")
        };
        Ok(Self {
            handle,
            name: result::device::get_name(handle).named("reading the device's name")?,
            major: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32,
            minor: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
            shared_bytes: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )? as u32,
            multiprocessor_shared_bytes: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            )?
            .max(1) as u32,
            l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as u64,
            memory_pools: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0,
        })
    }
}

pub(super) fn load_module(ptx: &str) -> Result<sys::CUmodule, CudaError> {
    let image = CString::new(ptx).map_err(|_| CudaError::Driver {
        operation: "loading a module",
        detail: "the PTX holds a NUL byte".to_string(),
    })?;
    // SAFETY: the image is NUL-terminated PTX text and outlives the call.
    unsafe { result::module::load_data(image.as_ptr().cast()) }.named("loading a module")
}

pub(super) fn unload_module(module: sys::CUmodule) {
    // SAFETY: the owner unloads each module once, with its context current.
    if let Err(error) = unsafe { result::module::unload(module) } {
        tracing::warn!(?error, "unloading a CUDA module failed");
    }
}

/// `None` where the module has no such kernel.
pub(super) fn function(
    module: sys::CUmodule,
    symbol: &str,
) -> Result<Option<sys::CUfunction>, CudaError> {
    let name = CString::new(symbol).expect("symbols hold no NUL");
    // SAFETY: `module` is loaded, and the name ends in NUL.
    match unsafe { result::module::get_function(module, name) } {
        Ok(function) => Ok(Some(function)),
        Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_FOUND)) => Ok(None),
        Err(error) => Err(error).named("resolving a kernel"),
    }
}

/// Lets a kernel use all the shared memory that a block of the device may have, its static part deducted.
pub(super) fn allow_dynamic_shared(function: sys::CUfunction, limit: u32) -> Result<(), CudaError> {
    use sys::CUfunction_attribute as Attribute;
    // SAFETY: `function` is a kernel of a loaded module.
    let fixed = unsafe {
        result::function::get_function_attribute(
            function,
            Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
        )
    }
    .named("reading a kernel's shared memory")?;
    let dynamic = limit as i32 - fixed;
    // SAFETY: `function` is a kernel of a loaded module, and the value is within what the device allows.
    unsafe {
        result::function::set_function_attribute(
            function,
            Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            dynamic,
        )
    }
    .named("raising a kernel's shared memory")
}

/// Hints at how much of a multiprocessor's shared memory to set aside for a kernel, per cent of what there can be.
pub(super) fn prefer_shared(function: sys::CUfunction, percent: u32) -> Result<(), CudaError> {
    // SAFETY: `function` is a kernel of a loaded module.
    unsafe {
        result::function::set_function_attribute(
            function,
            sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
            percent.min(100) as i32,
        )
    }
    .named("setting shared memory aside for a kernel")
}

/// Where and how a kernel runs.
pub(super) struct Launch {
    pub(super) function: sys::CUfunction,
    pub(super) grid: [u32; 3],
    pub(super) block: u32,
    pub(super) shared_bytes: u32,
    pub(super) stream: sys::CUstream,
}

impl Launch {
    /// What the driver takes, with one attribute, which must outlive it.
    fn config(&self, attribute: &mut sys::CUlaunchAttribute) -> sys::CUlaunchConfig {
        sys::CUlaunchConfig {
            gridDimX: self.grid[0],
            gridDimY: self.grid[1],
            gridDimZ: self.grid[2],
            blockDimX: self.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes,
            hStream: self.stream,
            attrs: attribute,
            numAttrs: 1,
        }
    }
}

/// Enqueues a kernel with programmatic dependent launch: it may start before its predecessor has finished and waits for it itself.
///
/// # Safety
/// `arguments` point to values of the kernel's parameter types; the addresses inside them are valid for the kernel until it has run.
pub(super) unsafe fn launch(
    launch: &Launch,
    arguments: &mut [*mut c_void],
) -> Result<(), CudaError> {
    let mut attribute = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue {
            programmaticStreamSerializationAllowed: 1,
        },
    };
    let config = launch.config(&mut attribute);
    // SAFETY: `config` and `attribute` live through the call; the caller vouches for the arguments.
    unsafe {
        sys::cuLaunchKernelEx(
            &config,
            launch.function,
            arguments.as_mut_ptr(),
            std::ptr::null_mut(),
        )
    }
    .result()
    .named("launching a kernel")
}

/// How many clusters of a kernel, `blocks` blocks each, the device runs at once.
pub(super) fn resident_clusters(launch: &Launch, blocks: u32) -> Result<u32, CudaError> {
    let mut attribute = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue {
            clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
                x: blocks,
                y: 1,
                z: 1,
            },
        },
    };
    let config = launch.config(&mut attribute);
    let mut clusters = 0;
    // SAFETY: `clusters`, `config` and `attribute` live through the call, and the function is a kernel of a loaded module.
    unsafe { sys::cuOccupancyMaxActiveClusters(&mut clusters, launch.function, &config) }
        .result()
        .named("asking how many clusters run at once")?;
    Ok(clusters.max(0) as u32)
}

/// A strided copy from host to device memory.
pub(super) struct HostToDevice {
    pub(super) source: *const c_void,
    pub(super) source_pitch: usize,
    pub(super) destination: u64,
    pub(super) destination_pitch: usize,
    pub(super) row_bytes: usize,
    pub(super) rows: usize,
}

/// Enqueues `copy`.
///
/// # Safety
/// Source and destination ranges are valid, and stay so until the copy has run.
pub(super) unsafe fn copy_to_device(
    copy: &HostToDevice,
    stream: sys::CUstream,
) -> Result<(), CudaError> {
    if copy.rows == 1 {
        // A 2-D copy has a limit of 2 GiB a row.
        // SAFETY: the caller vouches for the ranges.
        return unsafe {
            sys::cuMemcpyHtoDAsync_v2(copy.destination, copy.source, copy.row_bytes, stream)
        }
        .result()
        .named("copying to the device");
    }
    let plan = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
        srcHost: copy.source,
        srcDevice: 0,
        srcArray: std::ptr::null_mut(),
        srcPitch: copy.source_pitch,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: std::ptr::null_mut(),
        dstDevice: copy.destination,
        dstArray: std::ptr::null_mut(),
        dstPitch: copy.destination_pitch,
        WidthInBytes: copy.row_bytes,
        Height: copy.rows,
    };
    // SAFETY: `plan` lives through the call; the caller vouches for the ranges.
    unsafe { sys::cuMemcpy2DAsync_v2(&plan, stream) }
        .result()
        .named("copying to the device")
}
