package bmctest

import (
	"net/http"
	"slices"
	"strconv"
)

const (
	tasksPath    = root + "/TaskService/Tasks"
	monitorsPath = root + "/TaskService/TaskMonitors"
)

// taskReads is how many reads of the BMC a task lasts.
const taskReads = 3

// task is work that a BMC does later. It goes on with each read that the BMC
// answers, so that it needs no time and nobody who runs it.
type task struct {
	id       int
	name     string
	left     int  // reads until the end
	waits    bool // for the next boot
	over     bool
	state    string // of one that is over
	status   string
	work     func(*Redfish) // once, with mu held
	vanished bool
}

// begin starts a task and says where it is.
func (r *Redfish) begin(name string, atBoot bool, work func(*Redfish)) reply {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := &task{id: len(r.tasks) + 1, name: name, left: taskReads, waits: atBoot, work: work}
	r.tasks = append(r.tasks, t)
	answer := reply{status: http.StatusAccepted}
	switch {
	case r.faults.on(TaskUnnamed):
	case r.faults.on(TaskMonitorOnly):
		answer.header = map[string]string{"Location": monitorsPath + "/" + strconv.Itoa(t.id)}
	case r.faults.on(TaskInLocation):
		answer.header = map[string]string{"Location": tasksPath + "/" + strconv.Itoa(t.id)}
	default:
		answer.header = map[string]string{"Location": monitorsPath + "/" + strconv.Itoa(t.id)}
		answer.body = t.object()
	}
	return answer
}

// tick is a read: each running task goes one step.
func (r *Redfish) tick() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range r.tasks {
		if t.over || t.waits || r.faults.on(TaskNeverEnds) {
			continue
		}
		if t.left--; t.left <= 0 {
			r.finish(t)
		}
	}
}

// applyAtBoot does what waits for a boot.
func (r *Redfish) applyAtBoot() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range r.tasks {
		if t.waits && !t.over {
			if t.waits = false; !r.faults.on(TaskNeverEnds) {
				r.finish(t)
			}
		}
	}
	r.bios.boot(r.faults)
	r.secure.boot()
}

// finish ends a task; the caller holds mu.
func (r *Redfish) finish(t *task) {
	t.over, t.state, t.status, t.vanished = true, "Completed", "OK", r.faults.on(TaskVanishes)
	switch {
	case r.faults.strike(TaskCritical):
		t.status = "Critical"
	case r.faults.strike(TaskException):
		t.state, t.status = "Exception", "Critical"
	default:
		t.work(r)
	}
}

// object is the task; the caller holds mu.
func (t *task) object() object {
	path := tasksPath + "/" + strconv.Itoa(t.id)
	o := resource(path, "#Task.v1_5_1.Task", t.name, object{
		"TaskState": "Running", "TaskStatus": "OK", "PercentComplete": 100 * (taskReads - t.left) / taskReads,
		"TaskMonitor": monitorsPath + "/" + strconv.Itoa(t.id), "StartTime": "2026-01-01T00:00:00Z", "Messages": []object{},
	})
	switch {
	case t.over:
		o["TaskState"], o["TaskStatus"], o["PercentComplete"], o["EndTime"] = t.state, t.status, 100, "2026-01-01T00:01:00Z"
		if t.status != "OK" {
			o["Messages"] = []object{{"MessageId": "Update.1.0.ApplyFailed", "Message": t.name + " failed.", "Severity": "Critical"}}
		}
	case t.waits:
		o["TaskState"], o["PercentComplete"] = "Pending", 0
	}
	return o
}

// find is the task of a request, nil when it is not shown; the caller holds mu.
func (x *exchange) task() *task {
	i := slices.IndexFunc(x.r.tasks, func(t *task) bool { return strconv.Itoa(t.id) == x.req.PathValue("id") })
	if i < 0 || x.r.tasks[i].over && x.r.tasks[i].vanished {
		return nil
	}
	return x.r.tasks[i]
}

var taskRoutes = map[string]handler{
	"GET " + root + "/TaskService": func(*exchange) reply {
		return ok(resource(root+"/TaskService", "#TaskService.v1_2_0.TaskService", "Task Service", object{"ServiceEnabled": true, "Tasks": link(tasksPath)}))
	},
	"GET " + tasksPath: func(x *exchange) reply {
		var members []string
		x.r.mu.Lock()
		if !x.r.faults.on(TaskMonitorOnly) {
			for _, t := range x.r.tasks {
				if !t.over || !t.vanished {
					members = append(members, tasksPath+"/"+strconv.Itoa(t.id))
				}
			}
		}
		x.r.mu.Unlock()
		return x.collection("TaskCollection", "Tasks", members...)
	},
	"GET " + tasksPath + "/{id}": func(x *exchange) reply {
		x.r.mu.Lock()
		defer x.r.mu.Unlock()
		t := x.task()
		if t == nil || x.r.faults.on(TaskMonitorOnly) {
			return missing()
		}
		return ok(t.object())
	},
	"GET " + monitorsPath + "/{id}": func(x *exchange) reply {
		x.r.mu.Lock()
		defer x.r.mu.Unlock()
		t := x.task()
		switch {
		case t == nil:
			return missing()
		case !t.over:
			answer := reply{status: http.StatusAccepted, header: map[string]string{"Location": monitorsPath + "/" + strconv.Itoa(t.id)}}
			if !x.r.faults.on(TaskMonitorOnly) {
				answer.body = t.object()
			}
			return answer
		case t.state != "Completed" || t.status != "OK":
			return fail(http.StatusInternalServerError, "Base.1.8.GeneralError", t.name+" failed.")
		case x.r.faults.on(TaskMonitorOnly):
			return done()
		}
		return ok(t.object())
	},
}
